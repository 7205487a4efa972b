"""lm-evaluation-harness, unmodified, finds of a small task of ours what it finds by transformers. (It is
not in requirements-dev.txt, since it needs some 30 packages: pip install "lm_eval[api,hf]".)"""
import json

import pytest

from clients import ROOT, serving
from serving.sessions import Sessions

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness")
pytestmark = pytest.mark.clients

PEOPLE = "Ada Ben Cleo Dan Eve Finn Gil Hana Ivo Jan Kim Leo".split()
SHOTS = 6


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """Two tasks over one file: choose the name; write the name."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    lines = [dict(text=f"Hi, I'm {name}, and I like {number} cats.", answer=0,
                  choices=[name, "Nobody at all"])
             for number, name in enumerate(PEOPLE)]
    files = dict(train=tmp_path / "train.jsonl", test=tmp_path / "test.jsonl")
    for file, some in zip(files.values(), (lines[:SHOTS], lines[SHOTS:])):
        file.write_text("".join(json.dumps(line) + "\n" for line in some))
    files = {split: str(file) for split, file in files.items()}
    common = dict(dataset_path="json", dataset_kwargs=dict(data_files=files), test_split="test",
                  fewshot_split="train", fewshot_config=dict(sampler="first_n"), num_fewshot=SHOTS,
                  doc_to_text="{{text}} What is my name?\n", target_delimiter=" ")
    return [common | dict(task="choose", output_type="multiple_choice", doc_to_choice="choices",
                          doc_to_target="answer", metric_list=[dict(metric="acc")]),
            common | dict(task="write", output_type="generate_until", doc_to_target="{{choices[answer]}}",
                          generation_kwargs=dict(until=["\n"], max_gen_toks=8),
                          metric_list=[dict(metric="exact_match")])]


def evaluated(tasks, model, arguments):
    """For each task and document what the model has answered, in the order of the documents."""
    import lm_eval
    size = arguments.pop("batch_size")
    found = lm_eval.simple_evaluate(model, model_args=arguments, tasks=tasks, batch_size=size,
                                    log_samples=True, bootstrap_iters=0)
    return {task: [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
            for task, samples in found["samples"].items()}


def test_it_finds_what_it_finds_by_transformers(tasks):
    """The examples of a few-shot prompt are cached, except where the log probabilities of the prompt
    are asked for: these must be computed."""
    directory = str(ROOT / "tiny_chat")
    expected = evaluated(tasks, "hf", dict(pretrained=directory, device="cpu", dtype="float32",
                                           batch_size=1))
    sizes = dict(gpu_cache_tokens=4096, cpu_cache_tokens=4096)
    with serving(Sessions(directory, dtype="float32", **sizes)) as server:
        found = evaluated(tasks, "local-completions", dict(
            model="tiny_chat", base_url=server.url + "/v1/completions", tokenizer=directory, batch_size=4,
            tokenizer_backend="huggingface", max_length=1024))
        turns = list(server.recent_turns)
    assert found["write"] == expected["write"] and len(expected["choose"]) == len(PEOPLE) - SHOTS
    for ours, theirs in zip(found["choose"], expected["choose"]):
        for ((logprob, greedy),), ((exact, was_greedy),) in zip(ours, theirs):
            assert float(logprob) == pytest.approx(float(exact), abs=1e-3) and greedy == was_greedy
    written = [turn for turn in turns if turn["completion_tokens"] > 1]
    scored = [turn for turn in turns if turn["completion_tokens"] == 1]
    assert len(written) == len(PEOPLE) - SHOTS and len(scored) == 2 * len(written)
    assert all(turn["gpu"] >= 0.8 * turn["prompt_tokens"] for turn in written[1:])
    assert not any(turn["gpu"] for turn in scored)
    print(*[(turn["gpu"], turn["prompt_tokens"]) for turn in written])
