"""A checkpoint of ours as a model of lm-evaluation-harness (needs the package lm_eval).

    from lm_eval import simple_evaluate
    simple_evaluate(model=open_model("runs/125m"), tasks=["hellaswag"])

Requests of unequal length share batches without padding entering a state: scored text is padded on
the right, where a causal model cannot see it, and prompts to continue are read by length
(eval/completion.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM

from eval.completion import complete
from eval.result import Subject
from eval.samples import SampleLog, Values
from eval.scoring import Window, rolling_windows, score, total, window_batches

DEFAULT_NEW_TOKENS = 256  # the harness's own where a task gives none


class HarnessModel(TemplateLM):
    """loglikelihood, loglikelihood_rolling and generate_until of a Subject."""

    def __init__(
        self,
        subject: Subject,
        *,
        max_length: int | None = None,
        batch_tokens: int = 8192,
        log: SampleLog | None = None,
    ) -> None:
        """
        Args:
            max_length: tokens that a request may have; None: the length the model was trained on.
            log: keeps what was answered.
        """
        super().__init__()
        self.subject = subject
        self.tokens = subject.need_tokenizer("lm-eval")
        self.max_length = subject.usual_length if max_length is None else max_length
        self.batch_tokens = batch_tokens
        self.log = SampleLog() if log is None else log
        self.truncated = 0
        """Requests whose beginning was left out."""

    @property
    def eot_token_id(self) -> int:
        return self.tokens.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self.tokens.bos_id

    @property
    def tokenizer_name(self) -> str:
        return self.tokens.sha256

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids without BOS: it is put before whole requests, never twice."""
        return self.tokens.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        windows = []
        for (_, text), context, continuation in requests:
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"a continuation is longer than the model: got {len(continuation)} tokens "
                    f"({text[:40]!r}...); expected at most {self.max_length}"
                )
            prefix = [] if context[:1] == [self.tokens.bos_id] else [self.tokens.bos_id]
            inputs = [*prefix, *context, *continuation[:-1]]
            self.truncated += len(inputs) > self.max_length
            windows.append(Window(inputs[-self.max_length :], continuation))

        def run(places: list[int]) -> Iterator[Values]:
            scores = score(
                self.subject.model,
                window_batches((windows[i] for i in places), self.batch_tokens),
                self.subject.device,
            )
            for one in scores:
                yield {"log_likelihood": -one.nll, "greedy": one.hits == one.tokens}

        found = self._answers("loglikelihood", [request[0] for request in requests], run)
        return [(values["log_likelihood"], values["greedy"]) for values in found]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        texts = [request.args for request in requests]

        def run(places: list[int]) -> Iterator[Values]:
            size = self.max_length
            windows = [
                list(
                    rolling_windows(
                        self.tok_encode(texts[i][0]), self.tokens.bos_id, window=size, stride=size
                    )
                )
                for i in places
            ]
            batches = window_batches((w for part in windows for w in part), self.batch_tokens)
            scores = score(self.subject.model, batches, self.subject.device)
            for part in windows:
                yield {"log_likelihood": -total(next(scores) for _ in part).nll}

        return [v["log_likelihood"] for v in self._answers("rolling", texts, run)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy; a request that asks for sampling is refused."""
        texts = [request.args for request in requests]

        def run(places: list[int]) -> Iterator[Values]:
            for place in places:
                context, settings = texts[place]
                yield {"answer": self._continued(context, settings)}

        return [values["answer"] for values in self._answers("generate", texts, run)]

    def _continued(self, context: str, settings: dict[str, Any]) -> str:
        if settings.get("do_sample") or settings.get("temperature", 0) > 0:
            raise ValueError(
                f"a task asks for sampling: got {settings}; expected greedy decoding; give the "
                "task's generation_kwargs do_sample: false"
            )
        until = settings.get("until") or []
        stops = [text for text in ([until] if isinstance(until, str) else until) if text]
        new_tokens = int(settings.get("max_gen_toks", DEFAULT_NEW_TOKENS))
        room = self.max_length - new_tokens
        prompt = self.tok_encode(context)
        if room < 1:
            raise ValueError(
                f"a task generates more than the model reads: got max_gen_toks {new_tokens}; "
                f"expected less than {self.max_length}"
            )
        self.truncated += 1 + len(prompt) > room
        prompt = [self.tokens.bos_id, *prompt[len(prompt) - min(len(prompt), room - 1) :]]
        (ids,) = complete(
            self.subject.model,
            [prompt],
            max_new_tokens=new_tokens,
            stop_ids=(self.tokens.eos_id,),
            batch_tokens=self.batch_tokens,
            finished=lambda new: any(stop in self.tokens.decode(new) for stop in stops),
        )
        answer = self.tokens.decode(ids)
        for stop in stops:
            answer = answer.split(stop)[0]
        return answer

    def _answers(
        self, kind: str, requests: Sequence[Any], run: Callable[[list[int]], Iterator[Values]]
    ) -> list[Values]:
        """The values of each request; equal requests are asked once."""
        keys = [
            hashlib.sha256(json.dumps([kind, request]).encode()).hexdigest()[:24]
            for request in requests
        ]
        first = {key: place for place, key in reversed(list(enumerate(keys)))}
        unique = list(dict.fromkeys(keys))
        found = self.log.scored(
            unique, lambda places: run([first[unique[i]] for i in places]), f"lm-eval: {kind}"
        )
        by_key = dict(zip(unique, found, strict=True))
        return [by_key[key] for key in keys]


def open_model(path: Path | str, device: str = "cpu") -> HarnessModel:
    """The harness's model of a run, step folder or model directory."""
    from dataclasses import replace

    from eval.evaluation import describe_subject
    from models.checkpoint_directory import resolve
    from models.weights import load_model

    directory = resolve(path)
    model = load_model(directory, device=device)
    return HarnessModel(replace(describe_subject(directory, model, model.config), device=device))
