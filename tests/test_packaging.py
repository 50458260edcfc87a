"""What is built from a checkout: which version it has, and that metadata, recipe and citation agree."""

import re
import runpy
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import ksgen

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
AUTHOR = ("-c", "user.name=tester", "-c", "user.email=tester@example.org", "-c", "commit.gpgsign=false")
version: Callable[[Path], str] = runpy.run_path(str(ROOT / "release" / "version.py"))["version"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The sources of release 0.3.0, without git."""
    (tmp_path / "ksgen").mkdir()
    (tmp_path / "ksgen" / "__init__.py").write_text('__version__ = "0.3.0"\n')
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *AUTHOR, *arguments], cwd=folder, check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "commit", "--allow-empty", "-m", "something")


def test_the_version_is_that_of_the_last_tag(checkout: Path) -> None:
    git(checkout, "init")
    commit(checkout)
    git(checkout, "tag", "v0.3.0")
    assert version(checkout) == "0.3.0"
    git(checkout, "tag", "measured-on-h100")
    commit(checkout)
    commit(checkout)
    assert version(checkout) == "0.3.0.post2"


def test_a_shallow_clone_and_a_folder_without_git_have_the_version_of_their_sources(checkout: Path) -> None:
    assert version(checkout) == "0.3.0"
    git(checkout.parent, "init", checkout.name)
    commit(checkout)
    git(checkout, "tag", "v0.2.0")
    git(checkout, "add", ".")
    commit(checkout)
    shallow = checkout / "shallow"
    git(checkout, "clone", "--depth", "1", "--no-tags", checkout.as_uri(), shallow.name)
    assert (version(checkout), version(shallow)) == ("0.2.0.post1", "0.3.0")


def test_a_folder_within_another_checkout_does_not_take_its_tags(checkout: Path) -> None:
    git(checkout, "init")
    commit(checkout)
    git(checkout, "tag", "v9.9.9")
    inner = checkout / "inner"
    (inner / "ksgen").mkdir(parents=True)
    (inner / "ksgen" / "__init__.py").write_text('__version__ = "0.3.1"\n')
    assert version(inner) == "0.3.1"


def test_a_source_distribution_keeps_the_version_that_it_was_built_with(checkout: Path) -> None:
    (checkout / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: ksgen\nVersion: 0.3.0.post7\n")
    assert version(checkout) == "0.3.0.post7"


def test_a_tag_of_another_release_is_refused(checkout: Path) -> None:
    git(checkout, "init")
    commit(checkout)
    git(checkout, "tag", "v0.4.0")
    told = r"tag v0\.4\.0, and ksgen\.__version__ = '0\.3\.0'; accepted: the same; set it to '0\.4\.0', and tag again"
    with pytest.raises(SystemExit, match=told):
        version(checkout)


def test_the_citation_names_this_release_and_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == ksgen.__version__
    assert [author["family-names"] for author in citation["references"][0]["authors"]] == [
        "Gonon",
        "Zheng",
        "Carrivain",
        "Le",
    ]
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


def test_the_conda_recipe_requires_what_the_wheel_requires() -> None:
    text = (ROOT / "release" / "conda" / "recipe.yaml").read_text(encoding="utf-8")
    recipe = yaml.safe_load(text)
    needed = {
        f"python {PROJECT['requires-python']}",
        *(re.sub(r"(>=)", r" \1", each.replace("-", "_")) for each in PROJECT["dependencies"]),
    }
    assert set(recipe["requirements"]["run"]) == needed
    assert recipe["build"]["python"]["entry_points"] == [
        f"{name} = {place}" for name, place in PROJECT["scripts"].items()
    ]
    assert f'default="{ksgen.__version__}"' in recipe["context"]["version"]


def test_the_workflow_runs_what_ci_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    steps = workflow["jobs"]["run"]["steps"]
    assert steps[-1] == {"run": ".ci/run"}
    assert steps[0]["with"] == {"fetch-depth": 0}  # versions come from tags
