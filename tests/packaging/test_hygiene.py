# SPDX-License-Identifier: Apache-2.0
"""What holds for every file of the project."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "client/kvpush_client/_proto"
SHIPPED = ("kvpushd", "client")
FOLDERS = (*SHIPPED, "testing", "tests", "tools", "benchmarks", "protos", "systemd")
LICENSED = {".py", ".c", ".proto", ".yaml", ".service", ".toml", ".sysusers", ".tmpfiles"}
LONGEST_MODULE = 400


def files(*folders: str, suffixes: set[str]) -> Iterator[Path]:
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in suffixes and GENERATED not in file.parents and file.is_file():
                yield file


def named(found: Iterator[Path]) -> list[str]:
    return [str(file.relative_to(ROOT)) for file in found]


def minimum(name: str) -> Version:
    """The lower bound that pyproject.toml gives for a package of the base install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (bound,) = (r for r in map(Requirement, project["dependencies"]) if r.name == name)
    (specifier,) = bound.specifier
    assert specifier.operator == ">="
    return Version(specifier.version)


def test_every_source_names_its_licence_in_the_first_two_lines() -> None:
    # Two, since a script starts with its interpreter.
    bare = (
        file
        for file in files(*FOLDERS, suffixes=LICENSED)
        if "SPDX-License-Identifier: Apache-2.0" not in "".join(file.read_text().splitlines()[:2])
    )
    assert named(bare) == []


def test_every_module_that_ships_can_be_read_in_one_sitting() -> None:
    lines = {file: len(file.read_text().splitlines()) for file in files(*SHIPPED, suffixes={".py"})}
    assert {str(file.relative_to(ROOT)): n for file, n in lines.items() if n > LONGEST_MODULE} == {}


def test_no_module_that_ships_has_a_marker_of_unfinished_work() -> None:
    marker = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    unfinished = (file for file in files(*SHIPPED, suffixes={".py"}) if marker.search(file.read_text()))
    assert named(unfinished) == []


def test_nothing_that_ships_imports_pickle() -> None:
    # Nothing on any socket is ever unpickled, so nothing needs the module.
    pickling = (
        file
        for file in files(*SHIPPED, suffixes={".py"})
        if imported(file) & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    )
    assert named(pickling) == []


def imported(file: Path) -> set[str]:
    """Top-level names that a module imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_generated_code_imports_on_the_oldest_protobuf_that_the_base_install_allows() -> None:
    versions = {
        Version(found[1])
        for file in GENERATED.glob("*_pb2.py")
        for found in re.finditer(r"^# Protobuf Python Version: (\S+)$", file.read_text(), re.MULTILINE)
    }
    assert len(versions) == 1
    assert versions.pop() <= minimum("protobuf") < Version("5.30")


def test_generated_code_imports_on_the_oldest_grpcio_that_the_base_install_allows() -> None:
    versions = {
        Version(found[1])
        for file in GENERATED.glob("*_pb2_grpc.py")
        for found in re.finditer(r"^GRPC_GENERATED_VERSION = '(\S+)'$", file.read_text(), re.MULTILINE)
    }
    assert len(versions) == 1
    assert versions.pop() <= minimum("grpcio")
