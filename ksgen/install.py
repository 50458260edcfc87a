"""The line that installs an extra of ksgen the way ksgen itself was installed here: from a checkout, a wheel, a repository or an index."""

import json
import shlex
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit


def install_line(extra: str) -> str:
    """Such as `pip install -e '.[cpu]' in ksgen's checkout`."""
    try:
        told = metadata.distribution("ksgen").read_text("direct_url.json")
        origin = json.loads(told) if told else {}
    except (metadata.PackageNotFoundError, ValueError):
        is_checkout = (Path(__file__).parents[1] / "pyproject.toml").is_file()
        origin = {"dir_info": {"editable": True}} if is_checkout else {}
    if "dir_info" in origin:
        flag = "-e " if origin["dir_info"].get("editable") else ""
        return f"pip install {flag}'.[{extra}]' in ksgen's checkout"
    if "vcs_info" in origin:
        version = origin["vcs_info"]
        return f"pip install 'ksgen[{extra}] @ {version['vcs']}+{origin['url']}@{version['commit_id']}'"
    if "archive_info" in origin:
        place = urlsplit(origin["url"])
        if place.scheme == "file":
            return f"pip install {shlex.quote(f'{unquote(place.path)}[{extra}]')}"
        return f"pip install 'ksgen[{extra}] @ {origin['url']}'"
    return f"pip install 'ksgen[{extra}]'"
