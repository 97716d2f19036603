from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echo_hub.config.sections import HubConfig
from echo_hub.run.base_files import resolve_base
from echo_hub.scoring.processes import parcel_of, where

BASE = resolve_base("builtin:tiny")


def config(**sections: Any) -> HubConfig:
    return HubConfig.model_validate({"scoring": {"engine": "ray"}, **sections})


def test_no_password_or_token_leaves_the_hub() -> None:
    secret = "a-secret-of-the-hub"
    chosen = config(
        server={"invite_tokens": [secret]},
        store={"url": f"postgresql://echo:{secret}@localhost/echo"},
        alerts={"webhook_url": f"https://x.example/{secret}", "webhook_secret": secret},
    )
    assert secret in json.dumps(chosen.model_dump(mode="json"))
    _, opening = parcel_of(chosen, BASE)
    assert secret not in json.dumps(opening)
    sent = HubConfig.model_validate(opening["config"])
    assert (sent.task, sent.reward, sent.sampling) == (chosen.task, chosen.reward, chosen.sampling)


def test_the_tokenizer_is_sent_and_no_weights() -> None:
    parcel, opening = parcel_of(config(), BASE)
    assert {"base/tokenizer.json", "base/config.json"} <= set(parcel.contents)
    assert not [name for name in parcel.contents if "safetensors" in name]
    assert opening["base_dir"] == "../base"


def test_files_of_jsonl_tasks_are_sent_and_found_there(tmp_path: Path) -> None:
    for name in ("train/problems.jsonl", "test/problems.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text('{"prompt": "1", "answer": "1"}\n')
    train, test = (str(tmp_path / name / "problems.jsonl") for name in ("train", "test"))
    options = {"path": train, "heldout_path": test}
    mixture = {"a": {"name": "jsonl", "options": options}, "b": {"name": "arithmetic"}}
    parcel, opening = parcel_of(config(task={"mixture": mixture}), BASE)
    told = opening["config"]["task"]["mixture"]["a"]["options"]  # type: ignore[index]
    assert {str(parcel.contents[told[name].removeprefix("../")]) for name in options} == {train, test}


def test_only_the_users_own_module_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").write_text("")
    (tmp_path / "own_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)

    def modules(name: str) -> dict[str, Path]:
        parcel, _ = parcel_of(config(task={"name": f"python:{name}:make"}), BASE)
        return {place: path for place, path in parcel.contents.items() if place.startswith("modules/")}

    assert modules("own_module") == {"modules/own_module.py": tmp_path / "own_module.py"}
    assert modules("own_package.tasks") == {"modules/own_package": tmp_path / "own_package"}
    for installed in ("numpy", "json", "echo_hub.tasks.arithmetic", "no_such_module"):
        assert modules(installed) == {}


def test_where_scoring_runs() -> None:
    assert where(HubConfig()) == "2 processes beside the hub"
    ray = {"address": "ray://head:10001", "scorer_cpus": 0.5, "scorer_resources": {"sandbox": 1}}
    assert where(config(ray=ray, task={"scorer_processes": 1})) == (
        "1 Ray actor at ray://head:10001, 0.5 CPU, 1 sandbox each"
    )


@pytest.mark.parametrize("ray", [{"address": "head"}, {"address": "http://head:1"}, {"scorer_resources": {"CPU": 2}}])
def test_settings_that_make_no_cluster_are_refused(ray: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="ray"):
        config(ray=ray)
