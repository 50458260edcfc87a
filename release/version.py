"""The version of a build, from git's tags: `v0.1.0` is 0.1.0, and the fifth commit after it 0.1.0.post5. hatchling
calls `version()`.

`ksgen.__version__` names the release that the sources belong to. Emitted sources and cache keys contain it, so that
commits between two releases share them. It is also the version of a build without tags: of a folder, or of a shallow
clone.
"""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def version(root: Path = ROOT) -> str:
    """The version of the checkout or of the unpacked source distribution in a folder."""
    described = root / "PKG-INFO"  # in a source distribution, which has no tags
    if described.is_file():
        return re.findall(r"^Version: (\S+)$", described.read_text(encoding="utf-8"), re.MULTILINE)[0]
    source = (root / "ksgen" / "__init__.py").read_text(encoding="utf-8")
    (release,) = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    tag, _, since = _git(root, "describe", "--tags", "--long", "--match", "v[0-9]*").rpartition("-g")[0].rpartition("-")
    if not tag:
        return release
    if since == "0" and tag != f"v{release}":
        advice = f"set it to {tag[1:]!r}, and tag again"
        raise SystemExit(f"tag {tag}, and ksgen.__version__ = {release!r}; accepted: the same; {advice}")
    return tag[1:] if since == "0" else f"{tag[1:]}.post{since}"


def _git(root: Path, *arguments: str) -> str:
    """What git says of a checkout; nothing of a folder that is none, or lies within another one."""
    try:
        done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=False)
    except OSError:  # no git
        return ""
    return done.stdout.strip() if (root / ".git").exists() else ""
