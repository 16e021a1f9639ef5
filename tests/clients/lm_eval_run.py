"""Run lm-eval on two local tasks, in a process of its own; print the answers as JSON.

It has its own process because its libraries read the environment when they are imported, and their
imports cause warnings.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

QUESTIONS = {"1+1=": 2, "1+2=": 3, "2+2=": 4, "2+1=": 3, "1+3=": 4}
CHOICES = ["1", "2", "3", "4"]
N_TOKENS = 5
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_choice": CHOICES,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "texts": {
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": N_TOKENS},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


def evaluate(model: str, url: str, folder: Path) -> dict[str, list[Any]]:
    """Return the answers to each question, by task: (log probability, is greedy) of each choice, or a text."""
    os.environ |= {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    import lm_eval
    from lm_eval.tasks import TaskManager

    rows = [{"question": text, "answer": sum_ - 1} for text, sum_ in QUESTIONS.items()]
    data = folder / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    for name, task in TASKS.items():
        # YAML contains JSON.
        (folder / f"{name}.yaml").write_text(
            json.dumps(
                {
                    "task": name,
                    "dataset_path": "json",
                    "dataset_kwargs": {"data_files": {"test": str(data)}},
                    "test_split": "test",
                    "doc_to_text": "{{question}}",
                    "doc_to_target": "{{answer}}",
                    **task,
                }
            )
        )
    arguments: dict[str, Any] = {"base_url": url}
    if model == "local-completions":
        arguments = {"base_url": f"{url}/v1/completions", "model": "cllm", "num_concurrent": 4}
    found = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    return {
        name: [sample["filtered_resps"] for sample in sorted(samples, key=lambda s: s["doc_id"])]
        for name, samples in found["samples"].items()
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(evaluate(sys.argv[1], sys.argv[2], Path(sys.argv[3]))) + "\n")
