"""EleutherAI's harness on our models, offline; skipped where the extra is not installed."""

import dataclasses
import importlib.util
import json
import math

import pytest
import torch

from eval import harness, niah, wikitext
from eval.evaluation import describe_subject
from eval.niah import make_samples
from eval.result import Options
from eval.samples import SampleStore, read_samples
from eval.task import find_task
from models.weights import load_model

needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs the extra lm-eval"
)
RAW = "".join(
    f" \n = Title {i} = \n \n It had a 3 @.@ 5 @-@ litre engine , and {i * 7} seats ; so be it . \n"
    for i in range(9)
)


@pytest.fixture
def scored(model_dir):
    """A real model as a Subject."""
    model = load_model(model_dir)
    return describe_subject(model_dir, model, model.config)


@pytest.fixture
def raw_file(tmp_path):
    path = tmp_path / "wiki.test.raw"
    path.write_text(RAW, encoding="utf-8", newline="")
    return path


def run(name, subject, options):
    task = find_task(name)
    task.check(subject, options)
    return task.run(subject, options)


def value(results, metric):
    (one,) = (r.value for r in results if r.metric == metric)
    return one


def logged(folder):
    return {header["task"]: list(done.values()) for header, done in read_samples(folder)}


@needs_lm_eval
def test_wikitext_agrees_with_ours_article_by_article(scored, raw_file, tmp_path):
    subject = dataclasses.replace(scored, samples=SampleStore(tmp_path, "aa", "tt"))
    options = Options(wikitext=raw_file, window=40)
    ours = run("wikitext", subject, options)
    theirs = run("lm-eval:wikitext", subject, options)
    for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert value(theirs, metric) == pytest.approx(value(ours, metric), rel=1e-6)
    logs = logged(tmp_path)
    assert len(logs["wikitext"]) == len(logs["lm-eval:wikitext"]) == 9
    for a, b in zip(logs["wikitext"], logs["lm-eval:wikitext"], strict=True):
        assert -b["log_likelihood"] == pytest.approx(a["nll"], rel=1e-6)


@needs_lm_eval
@pytest.mark.slow
def test_wikitext_2_agrees_with_ours(shared_data, scored, tmp_path):
    """The whole raw test split: their task, detokeniser, windows and counts against ours."""
    options = Options(wikitext=shared_data / "wikitext-2" / "wiki.test.raw.xz", window=256)
    subject = dataclasses.replace(scored, samples=SampleStore(tmp_path, "aa", "tt"))
    ours = run("wikitext", subject, options)
    theirs = run("lm-eval:wikitext", subject, options)
    assert {r.count for r in ours} == {241_335, 1_290_588}
    for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert value(theirs, metric) == pytest.approx(value(ours, metric), rel=1e-4)
    logs = logged(tmp_path)
    for a, b in zip(logs["wikitext"], logs["lm-eval:wikitext"], strict=True):
        assert -b["log_likelihood"] == pytest.approx(a["nll"], rel=1e-5)


@needs_lm_eval
@pytest.mark.parametrize("name", ["single_1", "multikey_2"])
def test_niah_agrees_with_ours_sample_by_sample(scored, tmp_path, name):
    subject = dataclasses.replace(scored, samples=SampleStore(tmp_path, "aa", "tt"))
    options = Options(niah_tasks=(name,), lengths=(600,), answer_tokens=12, samples=4)
    ours = run("niah", subject, options)
    theirs = run(f"lm-eval:niah_{name}", subject, options)
    assert 100 * value(theirs, "accuracy") == value(ours, "accuracy")
    logs = logged(tmp_path)
    answers = [one["answer"] for one in logs["niah"]]
    assert [one["answer"] for one in logs[f"lm-eval:niah_{name}"]] == answers
    assert all(answers)


@needs_lm_eval
def test_finished_requests_are_not_run_again(scored, raw_file, tmp_path):
    subject = dataclasses.replace(scored, samples=SampleStore(tmp_path, "aa", "tt"))
    options = Options(wikitext=raw_file, window=40)
    first = run("lm-eval:wikitext", subject, options)

    def untouchable(*args, **kwargs):
        raise AssertionError("the model was asked again")

    subject = dataclasses.replace(subject, model=untouchable)
    assert run("lm-eval:wikitext", subject, options) == first


@needs_lm_eval
def test_batches_of_unequal_requests_score_as_each_alone(scored):
    from lm_eval.api.instance import Instance

    from eval.harness_model import HarnessModel

    texts = [("It was " + "very " * n, "late indeed") for n in range(12)] + [("", "late")]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(texts)]
    alone = HarnessModel(scored, batch_tokens=1).loglikelihood(requests, disable_tqdm=True)
    together = HarnessModel(scored, batch_tokens=10_000).loglikelihood(requests, disable_tqdm=True)
    for (a, greedy_a), (b, greedy_b) in zip(alone, together, strict=True):
        assert a == pytest.approx(b, abs=1e-4)
        assert greedy_a == greedy_b
    prompts = [
        Instance("generate_until", {}, (context, {"until": ["\n"], "max_gen_toks": 8}), i)
        for i, (context, _) in enumerate(texts)
    ]
    answers = HarnessModel(scored).generate_until(prompts)
    assert answers == [HarnessModel(scored).generate_until([prompt])[0] for prompt in prompts]
    assert all("\n" not in answer for answer in answers)


@needs_lm_eval
def test_log_likelihood_is_that_of_the_continuation_after_one_bos(scored):
    from lm_eval.api.instance import Instance

    from eval.harness_model import HarnessModel

    context, continuation = "It was", " very late"
    ids = scored.tokenizer.encode(context + continuation)
    start = len(scored.tokenizer.encode(context))
    with torch.no_grad():
        logits = scored.model(torch.tensor([[scored.tokenizer.bos_id, *ids]]))
    log_probs = logits[0].double().log_softmax(-1)
    expected = sum(float(log_probs[i, ids[i]]) for i in range(start, len(ids)))
    request = Instance("loglikelihood", {}, (context, continuation), 0)
    ((found, _),) = HarnessModel(scored).loglikelihood([request], disable_tqdm=True)
    assert found == pytest.approx(expected, rel=1e-5)
    (rolling,) = HarnessModel(scored).loglikelihood_rolling(
        [Instance("loglikelihood_rolling", {}, (context + continuation,), 0)]
    )
    whole = sum(float(log_probs[i, ids[i]]) for i in range(len(ids)))
    assert rolling == pytest.approx(whole, rel=1e-5)


@needs_lm_eval
def test_longer_requests_lose_their_beginning_and_are_counted(scored):
    from lm_eval.api.instance import Instance

    from eval.harness_model import HarnessModel

    model = HarnessModel(scored, max_length=32)
    pair = ("word " * 100, "late")
    ((found, _),) = model.loglikelihood([Instance("loglikelihood", {}, pair, 0)], disable_tqdm=True)
    assert math.isfinite(found)
    assert model.truncated == 1
    settings = {"until": [], "max_gen_toks": 8}
    model.generate_until([Instance("generate_until", {}, ("word " * 100, settings), 0)])
    assert model.truncated == 2
    with pytest.raises(ValueError, match="a task asks for sampling"):
        model.generate_until(
            [Instance("generate_until", {}, ("a", {**settings, "do_sample": True}), 0)]
        )
    with pytest.raises(ValueError, match="generates more than the model reads"):
        model.generate_until(
            [Instance("generate_until", {}, ("a", {**settings, "max_gen_toks": 40}), 0)]
        )


@needs_lm_eval
def test_unknown_task_is_refused(scored):
    with pytest.raises(ValueError, match="the harness has no such task: got lm-eval:nihilism"):
        find_task("lm-eval:nihilism").check(scored, Options())


def test_without_the_package_the_extra_is_named(scored, monkeypatch):
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"not installed: got task lm-eval:wikitext; .*lm-eval"):
        find_task("lm-eval:wikitext").check(scored, Options())


def test_our_samples_give_their_prompt_back(tokenizer):
    """Their prompt is input + " " + gen_prefix: it must be ours to the letter."""
    (sample,) = make_samples(tokenizer, "single_1", length=600, answer_tokens=8, samples=1, seed=0)
    document = harness._niah_document(0, sample, 600)
    assert f"{document['input']} {document['gen_prefix']}" == sample.prompt
    assert json.dumps(document)
    assert wikitext.VERSION == niah.VERSION == 2
