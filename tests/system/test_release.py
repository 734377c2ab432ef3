"""What a release is made of: the wheel, and the archive of sources, which passes its own tests."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from mlaunch import __version__
from tests.conftest import ROOT

pytestmark = pytest.mark.slow
LEFT_OUT = (".git", "_build", "build", "dist", "__pycache__", "*.egg-info", ".*_cache", ".venv*")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds both, from a copy, as the tools leave files where they build."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("release")
    shutil.copytree(ROOT, folder / "sources", ignore=shutil.ignore_patterns(*LEFT_OUT))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(folder / "sources")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.dear("pip builds a wheel")
def test_the_wheel_holds_the_package_alone(built: Path) -> None:
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        about = wheel.read(f"mlaunch-{__version__}.dist-info/METADATA").decode()
    assert {name.partition("/")[0] for name in names} == {"mlaunch", f"mlaunch-{__version__}.dist-info"}
    assert "mlaunch/py.typed" in names
    assert f"mlaunch-{__version__}.dist-info/licenses/LICENSE" in names
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "mlaunch").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert "Requires-Python: >=3.10" in about
    assert "License-Expression: Apache-2.0" in about or "License: Apache-2.0" in about


@pytest.mark.nightly
def test_the_archive_passes_its_own_tests(built: Path, tmp_path: Path) -> None:
    """Of all that is tracked nothing is missing; a few files of tests stand for the others."""
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    here = {str(one.relative_to(built / "sources")) for one in (built / "sources").rglob("*") if one.is_file()}
    there = {str(one.relative_to(unpacked)) for one in unpacked.rglob("*") if one.is_file()}
    assert {name for name in here - there if "egg-info" not in name} <= {".gitignore"}
    chosen = ["tests/unit/test_errors.py", "tests/contract/test_groups.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen],
        cwd=unpacked, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout)


def test_one_version() -> None:
    """The package says it once; what cannot read it there says the same."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["metadata"]["version"] == "attr: mlaunch._version.__version__"
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n{__version__} (" in (ROOT / "CHANGELOG.rst").read_text()
