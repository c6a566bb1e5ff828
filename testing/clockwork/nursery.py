# SPDX-License-Identifier: Apache-2.0
"""The process that imports vLLM once and forks engines. Started by `harness`; ends when its socket closes.

    python -m testing.clockwork.nursery FD

Over the SOCK_SEQPACKET socket FD comes one message per engine: a pickled EngineSpec with two descriptors, the
engine's end of its pipe, and a socket about its life. On the latter goes a pidfd, and at the end the wait
status as decimal text. An engine is killed when the nursery ends, however that happens.
"""

import ctypes
import importlib
import os
import pickle
import select
import signal
import socket
import sys
from multiprocessing.connection import Connection
from types import ModuleType

from testing import netns
from testing.clockwork.messages import EngineSpec

_PR_SET_PDEATHSIG = 1
_MAX_MESSAGE = 1 << 20
# What an engine would import by itself, seconds each time. Connectors' libraries are loaded, not used: an
# agent must not exist before a fork.
_PRELOADED = (
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector",
    "testing.clockwork.worker",
)


class Nursery:
    """Forks engines on request and says when they end."""

    def __init__(self, control: socket.socket, loop: ModuleType) -> None:
        self._control = control
        self._loop = loop
        self._lives: dict[int, tuple[int, socket.socket]] = {}

    def run(self) -> None:
        """Until the other end of the control socket goes away."""
        while True:
            control = self._control.fileno()
            ready, _, _ = select.select([control, *self._lives], [], [])
            for pidfd in [descriptor for descriptor in ready if descriptor != control]:
                self._bury(pidfd)
            if control in ready:
                message, descriptors, _, _ = socket.recv_fds(self._control, _MAX_MESSAGE, 2)
                if not message:
                    return
                self._fork(pickle.loads(message), *descriptors)  # from our parent, never from a network

    def _fork(self, spec: EngineSpec, pipe: int, life: int) -> None:
        life_socket = socket.socket(fileno=life)
        pid = os.fork()
        if pid == 0:
            self._live(spec, pipe, life_socket)
        os.close(pipe)
        pidfd = os.pidfd_open(pid)
        self._lives[pidfd] = (pid, life_socket)
        socket.send_fds(life_socket, [b"born"], [pidfd])

    def _live(self, spec: EngineSpec, pipe: int, life: socket.socket) -> None:
        status = 1
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            # Only the nursery may hold these: their end tells the harness that an engine ended.
            for inherited in (self._control, life, *(other for _, other in self._lives.values())):
                inherited.close()
            log = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            if spec.namespace is not None:
                netns.enter(spec.namespace)
            self._loop.run(spec, Connection(pipe))
            status = 0
        except BaseException as error:  # noqa: BLE001 - a fork must never return into the nursery
            self._loop.fail(error)
        finally:
            os._exit(status)

    def _bury(self, pidfd: int) -> None:
        pid, life = self._lives.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        with life:
            try:
                life.send(str(status).encode())
            except BrokenPipeError:
                return  # nobody waits for this engine any more


def main() -> None:
    """Import vLLM, then fork engines until told to end."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for module in _PRELOADED:
        importlib.import_module(module)
    from vllm import ModelRegistry
    from vllm.distributed import utils
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    from testing.clockwork import loop, model  # imports vLLM, and an EngineSpec needs none

    # An engine and its ranks wait for one another by sched_yield, 100,000 times a second, and Linux 6.18 may
    # let nobody else have their cores for seconds then. So vLLM waits on Pythons before 3.11.1.
    utils.USE_SCHED_YIELD = False
    model.register()
    # Known by class, it is not inspected in a subprocess, which takes longer than all else of a start.
    ModelRegistry.register_model("Qwen3ForCausalLM", Qwen3ForCausalLM)
    Nursery(control, loop).run()
    # Children die with us; no interpreter shutdown for what vLLM has loaded.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
