"""ksgen from a checkout: `python cli.py emit specs/vit.yaml`. All of it is in `ksgen/cli.py`."""

from ksgen.__main__ import main

if __name__ == "__main__":
    main()
