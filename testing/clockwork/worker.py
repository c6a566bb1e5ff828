# SPDX-License-Identifier: Apache-2.0
"""A CPU worker that shows the clockwork model its runner, and a harness its witness."""

from vllm.v1.worker.cpu_worker import CPUWorker

from testing.clockwork.clock import Clock, Verify
from testing.clockwork.model import ClockworkForCausalLM
from testing.clockwork.witness import Counts, Flip, Mismatch

QUALIFIED_NAME = "testing.clockwork.worker.ClockworkWorker"


class ClockworkWorker(CPUWorker):  # type: ignore[misc]
    """Give its name to vLLM as worker_cls. The methods beyond CPUWorker's are for `collective_rpc`."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load, then show the model its runner."""
        super().load_model(load_dummy_weights=load_dummy_weights)
        self._clockwork.watch(self.model_runner)

    def clockwork_report(self) -> tuple[Counts, list[Mismatch]]:
        """This rank's counts and records."""
        witness = self._clockwork.witness
        return witness.counts, list(witness.mismatches)

    def clockwork_set(self, clock: Clock | None, verify: Verify | None) -> None:
        """Replace what is given, from the next step on."""
        if clock is not None:
            self._clockwork.clock = clock
        if verify is not None:
            self._clockwork.witness.verify = verify

    def clockwork_forwards(self) -> dict[str, tuple[float, float]]:
        """The model's `forwards`, by vLLM's request ids; they are forgotten here."""
        found = dict(self._clockwork.forwards)
        self._clockwork.forwards.clear()
        return found

    def clockwork_arm(self, flip: Flip) -> None:
        """Flip a byte before the next step that reads it."""
        self._clockwork.witness.arm(flip)

    @property
    def _clockwork(self) -> ClockworkForCausalLM:
        model = self.model_runner.get_model()
        if not isinstance(model, ClockworkForCausalLM):
            raise TypeError(f"{type(model).__name__} is no clockwork model")
        return model
