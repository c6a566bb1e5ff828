# SPDX-License-Identifier: Apache-2.0
"""The plain engine. Run as `python -m kvpushctl.demo.plain`: a request on stdin, its answer in a file.

The request is JSON: `engine` (arguments of vllm.LLM), `prompts` (lists of token ids), `output_tokens`, and
`answer`, the file that gets a list of lists of token ids. stdout is vLLM's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def answer(request: dict[str, Any]) -> list[list[int]]:
    """What a single engine without any connector makes of the prompts, one after the other."""
    from vllm import LLM, SamplingParams

    engine = LLM(**request["engine"])
    greedy = SamplingParams(temperature=0, max_tokens=request["output_tokens"], ignore_eos=True)
    found = []
    for tokens in request["prompts"]:
        (output,) = engine.generate([{"prompt_token_ids": tokens}], greedy, use_tqdm=False)
        found.append(list(output.outputs[0].token_ids))
    return found


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    Path(asked["answer"]).write_text(json.dumps(answer(asked)))
