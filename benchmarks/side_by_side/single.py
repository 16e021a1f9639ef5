"""One sequence through the peers that are Python packages, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from benchmarks.side_by_side.peers import Peers
from benchmarks.side_by_side.workload import Setup, prompt_of

SCRIPTS = Path(__file__).parent / "peer_scripts"


def llama_cpp_python_rate(peers: Peers, setup: Setup, n_prompt: int, n_output: int) -> float:
    """Tokens per second of `Llama`, from the first token to the last."""
    return _rate(peers, "llama_cpp_python_loop.py", setup, n_prompt, n_output)


def xllamacpp_rate(peers: Peers, setup: Setup, n_prompt: int, n_output: int) -> float:
    """Tokens per second of xllamacpp's `Server`, over the llama.cpp in its wheel."""
    return _rate(peers, "xllamacpp_loop.py", setup, n_prompt, n_output)


def _rate(peers: Peers, script: str, setup: Setup, n_prompt: int, n_output: int) -> float:
    given = setup.context_options | {
        "model": str(setup.model),
        "prompt": prompt_of("0", n_prompt),
        "n_output": n_output,
    }
    done = subprocess.run(
        [str(peers.python), str(SCRIPTS / script), json.dumps(given)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout.splitlines()[-1])
