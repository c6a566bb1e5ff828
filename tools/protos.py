# SPDX-License-Identifier: Apache-2.0
"""Generates client/kvpush_client/_proto from protos/, or with --check says whether the tree is current.

Run it by `make protos`, which installs the pinned compiler: the generated code must import on the oldest
protobuf that the supported vLLM allows, and protobuf refuses code that is newer than itself.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "client" / "kvpush_client" / "_proto"
# protoc writes absolute imports from the root of the protos; ours live inside the client package.
IMPORT = re.compile(r"^from kvpush\.v1 import", re.MULTILINE)
STUB = re.compile(r"\bkvpush\.v1\.(\w+_pb2)\b")


def generate(out: Path) -> None:
    """Writes the modules and their stubs into `out`."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # protoc looks for its plugins
    files = sorted(str(f) for f in (ROOT / "protos").rglob("*.proto"))
    flags = [f"--{kind}_out={out}" for kind in ("python", "grpc_python")]
    flags += [f"--{kind}_out=quiet:{out}" for kind in ("mypy", "mypy_grpc")]
    if protoc.main(["protoc", f"-I{ROOT / 'protos'}", *flags, *files]) != 0:
        sys.exit("protoc failed")
    made = out / "kvpush" / "v1"
    for file in made.iterdir():
        text = IMPORT.sub("from kvpush_client._proto import", file.read_text())
        text = STUB.sub(r"kvpush_client._proto.\1", text)
        text = re.sub(r"^import kvpush_client\._proto\.(\w+)$", r"import kvpush_client._proto.\1", text)
        (out / file.name).write_text(text)
    shutil.rmtree(out / "kvpush")
    for file in out.glob("*_pb2_grpc.py*"):
        if b"service" not in file.read_bytes() and "Stub" not in file.read_text():
            file.unlink()
    (out / "__init__.py").write_text('"""Generated from protos/ by `make protos`; never edited."""\n')


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as tmp:
        out = Path(tmp)
        generate(out)
        names = sorted(f.name for f in out.iterdir())
        if check:
            have = sorted(f.name for f in TREE.iterdir() if f.is_file())
            _, differ, missing = filecmp.cmpfiles(out, TREE, names, shallow=False)
            if differ or missing or names != have:
                print(
                    "client/kvpush_client/_proto is not what protos/ says: run `make protos`", file=sys.stderr
                )
                return 1
            return 0
        shutil.rmtree(TREE, ignore_errors=True)
        shutil.copytree(out, TREE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
