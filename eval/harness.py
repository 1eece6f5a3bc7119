"""Tasks of EleutherAI's lm-evaluation-harness on our checkpoints: `--tasks lm-eval:NAME`.

The package lm_eval is an optional extra. NAME is any of its tasks or groups; their data come from
where it looks for them, with two exceptions that need no network: `wikitext` reads the file of
--wikitext, and `niah_*` get the samples of eval/niah_samples.py, scored by its own functions.
Metrics are its own, each with the standard error that it computes; what the model answered is kept,
request by request, so a stopped evaluation goes on.

Prompts start with exactly one BOS. Where one is longer than the model, its beginning is left out,
as the harness does, and `truncated_requests` in the settings says how often.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from eval import niah, wikitext
from eval.niah_haystack import Essays
from eval.result import Options, Result, Subject

if TYPE_CHECKING:
    from eval.niah_samples import Sample

PREFIX = "lm-eval:"
VERSION = 1
NIAH = "niah_"


def check(name: str, subject: Subject, options: Options) -> None:
    """Refuse where the package is missing, a model without tokenizer, an unknown task, and what our
    own sources of its data refuse."""
    task = PREFIX + name
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(
            f"the package lm_eval is not installed: got task {task}; expected the optional extra; "
            "run pip install '.[lm-eval]' -c constraints.txt"
        )
    subject.need_tokenizer(task)
    subject.check_length("the harness's window", _window(subject, options))
    if name.startswith(NIAH):
        niah.check(subject, _niah_options(name, options))
    elif name == "wikitext" and options.wikitext is not None:
        wikitext.check(subject, options)
    else:
        from lm_eval.tasks import TaskManager

        if name not in TaskManager().task_index:
            raise ValueError(
                f"the harness has no such task: got {task}; expected a task or group that "
                "`lm_eval ls tasks` lists; correct --tasks"
            )


def run(name: str, subject: Subject, options: Options) -> list[Result]:
    """All metrics of the harness's task, and of the tasks of its group."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    from eval.harness_model import HarnessModel

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    tokenizer = subject.need_tokenizer(PREFIX + name)
    settings: dict[str, Any] = {
        "lm_eval": lm_eval.__version__,
        "max_length": _window(subject, options),
        "bos": "one, before every prompt",
        "fewshot": options.fewshot,
        "tokenizer_sha256": tokenizer.sha256[:16],
        **subject.length_mark(_window(subject, options)),
    }
    log = subject.samples.open(PREFIX + name, VERSION, settings)
    model = HarnessModel(
        subject, max_length=settings["max_length"], batch_tokens=options.batch_tokens, log=log
    )
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=[_task(name, subject, options)],
        num_fewshot=options.fewshot,
        limit=None if name.startswith(NIAH) else options.limit,
        task_manager=TaskManager(verbosity="ERROR"),
        log_samples=False,
    )
    log.close()
    settings |= {"truncated_requests": model.truncated, "limit": options.limit}
    return _results(found, settings)


def _window(subject: Subject, options: Options) -> int:
    return subject.usual_length if options.window is None else options.window


def _niah_options(name: str, options: Options) -> Options:
    return replace(options, niah_tasks=(name.removeprefix(NIAH),))


def _task(name: str, subject: Subject, options: Options) -> str | dict[str, Any]:
    """What simple_evaluate takes: a name, or the harness's task on our data."""
    if name.startswith(NIAH):
        return niah_task(name, subject, options)
    if name == "wikitext" and options.wikitext is not None:
        return wikitext_task(options)
    return name


def wikitext_task(options: Options) -> dict[str, Any]:
    """The harness's `wikitext` on the articles of a local file."""
    from lm_eval.tasks.wikitext import preprocess_wikitext

    _, _, articles = wikitext.read_articles(options)
    return {
        "task": "wikitext",
        "custom_dataset": _custom([{"page": article} for article in articles]),
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": preprocess_wikitext.wikitext_detokenizer,
        "process_results": preprocess_wikitext.process_results,
        "metric_list": [
            {"metric": metric} for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte")
        ],
        "metadata": {"version": 2.0},
    }


def niah_task(name: str, subject: Subject, options: Options) -> dict[str, Any]:
    """The harness's form of a RULER task, with our samples and its scoring."""
    from lm_eval.tasks.ruler import common_utils

    tokenizer = subject.need_tokenizer(name)
    options = _niah_options(name, options)
    essays = None if options.haystack is None else Essays.load(options.haystack)
    documents = [
        _niah_document(place, sample, length)
        for length in options.lengths or (subject.usual_length,)
        for place, sample in enumerate(
            niah.make_samples(
                tokenizer,
                options.niah_tasks[0],
                length=length,
                answer_tokens=options.answer_tokens,
                samples=options.samples,
                seed=options.seed,
                essays=essays,
            )
        )
    ]
    lengths = sorted({str(document["max_length"]) for document in documents}, key=int)
    return {
        "task": name,
        "custom_dataset": _custom(documents),
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": "{{input}}",
        "doc_to_target": "{{outputs}}",
        "gen_prefix": "{{gen_prefix}}",
        "target_delimiter": " ",
        "process_results": common_utils.process_results,
        "metric_list": [
            {
                "metric": length,
                "aggregation": common_utils.aggregate_metrics,
                "higher_is_better": True,
            }
            for length in lengths
        ],
        "generation_kwargs": {
            "do_sample": False,
            "temperature": 0.0,
            "max_gen_toks": options.answer_tokens,
            "until": [],
        },
        "metadata": {"version": 1.0},
    }


def _niah_document(place: int, sample: Sample, length: int) -> dict[str, Any]:
    return {
        "index": place,
        "input": sample.prompt.removesuffix(f" {sample.answer_start}"),
        "outputs": sample.references,
        "gen_prefix": sample.answer_start,
        "max_length": length,
    }


def _custom(documents: list[dict[str, Any]]) -> Any:
    import datasets

    def load(**_: Any) -> dict[str, Any]:
        return {"test": datasets.Dataset.from_list(documents)}

    return load


def _results(found: Any, settings: dict[str, Any]) -> list[Result]:
    results = []
    for name, metrics in found["results"].items():
        count = found.get("n-samples", {}).get(name, {}).get("effective", 0)
        version = str(found.get("versions", {}).get(name))
        for key, value in metrics.items():
            metric, comma, rule = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, float | int):
                continue
            error = metrics.get(f"{metric}_stderr,{rule}")
            own = {"filter": rule, "task_version": version}
            if name.startswith(NIAH) and metric.isdecimal():
                if value == -1:  # its way to say that no sample has this length
                    continue
                metric, own["length"] = "accuracy", metric
            results.append(
                Result(
                    task=PREFIX + name,
                    version=VERSION,
                    metric=metric,
                    value=float(value),
                    unit="as lm-eval gives it",
                    count=count,
                    standard_error=float(error) if isinstance(error, float) else None,
                    settings={**settings, **own},
                )
            )
    return results
