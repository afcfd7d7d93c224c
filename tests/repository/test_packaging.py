"""What is in the wheel: every file of the four folders, and nothing at the top level but commlib; and in the sdist."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import entry_points, version

import pytest
from packaging.metadata import Metadata

import commlib
from tests.support import built_distributions
from tests.support.built_distributions import tracked

FOLDERS = {
    "commlib": "commlib",
    "compressors": "commlib/compressors",
    "transports": "commlib/transports",
    "bench": "commlib/bench",
}


@dataclasses.dataclass(frozen=True)
class Built:
    """Names in the wheel and in the source distribution, and what the wheel says of itself."""

    wheel: list[str]
    sdist: list[str]
    metadata: bytes


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """What the build makes of the tracked files: the sdist, and the wheel from the sdist."""
    made = built_distributions.build(tmp_path_factory.mktemp("built"))
    (wheel,), (sdist,) = made.glob("*.whl"), made.glob("*.tar.gz")
    assert wheel.name == f"torch_commlib-{commlib.__version__}-py3-none-any.whl"
    assert sdist.name == f"torch_commlib-{commlib.__version__}.tar.gz"
    with zipfile.ZipFile(wheel) as archive, tarfile.open(sdist) as source:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        inside = [member.name.partition("/")[2] for member in source.getmembers() if member.isfile()]
        return Built(archive.namelist(), inside, archive.read(metadata))


@pytest.mark.full
@pytest.mark.checkout
def test_every_file_of_the_folders_is_in_the_wheel(built: Built) -> None:
    wanted = {}
    for name in tracked():
        folder, _, rest = name.partition("/")
        if folder in FOLDERS:
            wanted[f"{FOLDERS[folder]}/{rest}"] = name
    assert {"commlib/py.typed", "commlib/bench/plan/convergence.csv"} <= set(wanted)
    forgotten = sorted(name for inside, name in wanted.items() if inside not in built.wheel)
    assert not forgotten, "list their package, or them, under [tool.setuptools] in pyproject.toml: " + ", ".join(
        forgotten
    )


@pytest.mark.full
@pytest.mark.checkout
def test_commlib_is_the_only_top_level_name(built: Built) -> None:
    top = {name.partition("/")[0] for name in built.wheel}
    assert {name for name in top if not name.endswith(".dist-info")} == {"commlib"}


@pytest.mark.full
@pytest.mark.checkout
def test_the_wheel_carries_no_tests_and_the_licence(built: Built) -> None:
    assert not [name for name in built.wheel if "test_" in name or "conftest" in name]
    assert any(name.endswith("/licenses/LICENSE") for name in built.wheel)


@pytest.mark.full
@pytest.mark.checkout
def test_the_sdist_is_the_checkout_tests_and_docs_included(built: Built) -> None:
    wanted = {name for name in tracked() if not name.startswith((".ci/", ".git"))}
    assert sorted(wanted - set(built.sdist)) == [], "name them in MANIFEST.in"
    made = {"PKG-INFO", "setup.cfg"}
    assert sorted(n for n in set(built.sdist) - wanted - made if not n.startswith("torch_commlib.egg-info/")) == []


@pytest.mark.full
@pytest.mark.checkout
def test_the_metadata_is_valid_and_its_version_the_one_that_the_package_says(built: Built) -> None:
    found = Metadata.from_email(built.metadata, validate=True)  # as an index does
    assert (found.name, str(found.version)) == ("torch-commlib", commlib.__version__)
    assert (found.license_expression, found.license_files) == ("Apache-2.0", ["LICENSE"])
    assert found.description_content_type == "text/markdown"
    assert "Requires-Dist: torch>=2.7\n" in built.metadata.decode()


def test_the_installed_version_is_the_one_that_the_package_says() -> None:
    assert version("torch-commlib") == commlib.__version__, "installed before the version changed: make .venv/.ready"


@pytest.mark.parametrize(
    "group", ["commlib.commands", "commlib.compressors", "commlib.filters", "commlib.process_groups"]
)
def test_every_entry_point_of_this_distribution_loads(group: str) -> None:
    ours = [ep for ep in entry_points(group=group) if ep.value.startswith("commlib.")]
    assert ours
    broken = {}
    for ep in ours:
        try:
            ep.load()
        except (ImportError, AttributeError) as e:
            broken[ep.name] = str(e)
    assert not broken


def test_neither_commlib_nor_its_commands_load_torchs_compiler() -> None:
    """It takes a second or two; whoever compiles, or wraps a model in DDP, loads it himself."""
    modules = {ep.module for ep in entry_points(group="commlib.commands") if ep.module.startswith("commlib.")}
    assert len(modules) > 5
    loaded = f"import sys, commlib, {', '.join(modules)}; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], check=False).returncode == 0
