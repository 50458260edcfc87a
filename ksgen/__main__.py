"""`python -m ksgen`."""

from ksgen.cli import main

if __name__ == "__main__":
    main()
