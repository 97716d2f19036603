import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from echo_hub.config.sections import HubConfig
from echo_hub.config.task_sections import TaskConfig
from echo_hub.run.base_files import model_hub_source, resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.tasks.registry import make_task
from echo_shared.artefacts.hashed_files import describe_files
from echo_shared.errors import ConfigError
from echo_shared.wire.messages.fields import MAX_TOKENS

TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve_base("builtin:tiny"), tmp_path / "model"))


def change(path: Path, **values: object) -> None:
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def observation(codec: PromptCodec, text: str, *, after: int) -> NDArray[np.int32]:
    """Return the ids of a user turn that follows a completion whose last token is `after`."""
    return codec.encode_answer([{"role": "user", "content": text}], after=after)


def test_the_builtin_model_is_small_and_fit_to_be_published() -> None:
    files = describe_files(resolve_base("builtin:tiny"))
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {f.path for f in files}
    assert sum(file.size_bytes for file in files) <= 4_000_000


def test_the_builtin_tokenizer_has_one_token_a_character() -> None:
    codec = PromptCodec.load(resolve_base("builtin:tiny"))
    text = "123+456=\n" + "".join(map(chr, range(32, 127)))
    ids = codec.encode_prompt(text)
    assert ids.dtype == np.int32
    assert len(ids) == len(text)
    assert codec.decode(ids) == text
    assert codec.decode([*ids.tolist(), *codec.stop_ids]) == text


def test_the_codec_agrees_with_transformers() -> None:
    directory = resolve_base("builtin:tiny")
    codec, reference = PromptCodec.load(directory), AutoTokenizer.from_pretrained(directory)
    for text in ("99+1=", "a  b\n c", " 7 ", "é<eos>"):
        ids = codec.encode_prompt(text)
        assert ids.tolist() == reference.encode(text, split_special_tokens=True)
        assert codec.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert codec.stop_ids == (reference.eos_token_id,)
    assert reference.chat_template is None


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "list"])
def test_a_chat_template_is_applied_like_transformers(model: Path, place: str) -> None:
    if place == "chat_template.jinja":
        (model / place).write_text(TEMPLATE)
    else:
        named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
        change(model / "tokenizer_config.json", chat_template=named if place == "list" else TEMPLATE)
    ids = PromptCodec.load(model).encode_prompt("1+1=")
    conversation = [{"role": "user", "content": "1+1="}]
    reference: Any = AutoTokenizer.from_pretrained(model)
    assert ids.tolist() == reference.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"]
    assert ids.tolist().count(reference.eos_token_id) == 1


def test_an_observation_is_the_templates_text_between_two_replies(model: Path) -> None:
    (model / "chat_template.jinja").write_text(TEMPLATE)
    codec, reference = PromptCodec.load(model), AutoTokenizer.from_pretrained(model)
    prompt, eos = codec.encode_prompt("guess"), reference.eos_token_id
    turns = [{"role": "user", "content": "guess"}, {"role": "assistant", "content": "42"}]
    whole = reference.apply_chat_template([*turns, {"role": "user", "content": "more"}], add_generation_prompt=True)
    reply = reference.encode("42")
    for drawn in ([*reply, eos], reply):  # The completion ends with a stop token, or was truncated before one.
        between = observation(codec, "more", after=drawn[-1])
        assert [*prompt.tolist(), *drawn, *between.tolist()] == whole["input_ids"]
    assert observation(codec, "more", after=7).tolist()[0] == eos


def test_an_observation_without_a_template_is_its_text() -> None:
    codec = PromptCodec.load(resolve_base("builtin:tiny"))
    assert codec.decode(observation(codec, ">=", after=codec.stop_ids[0])) == ">="
    assert len(observation(codec, ">=", after=codec.stop_ids[0])) == 2


def test_a_template_that_hides_replies_has_no_observations(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    with pytest.raises(ConfigError, match="omits the assistant's message"):
        observation(PromptCodec.load(model), "more", after=1)


def test_how_long_a_conversation_may_be(model: Path) -> None:
    assert PromptCodec.load(model).context_tokens == 256
    change(model / "config.json", max_position_embeddings=None, text_config={"max_position_embeddings": 64})
    assert PromptCodec.load(model).context_tokens == 64
    change(model / "config.json", text_config=None)
    assert PromptCodec.load(model).context_tokens == MAX_TOKENS


CHATML = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


@pytest.fixture
def chat_model(model: Path) -> Path:
    """Return the builtin model with a tokenizer as chat models have it: single bytes, two special tokens, ChatML."""
    tokenizer = Tokenizer(
        models.BPE(vocab={c: n for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=CHATML).save_pretrained(
        model
    )
    change(model / "config.json", vocab_size=tokenizer.get_vocab_size())
    return model


@pytest.mark.parametrize("system_prompt", ["", "Think first. Give the answer as <answer>...</answer>."])
@pytest.mark.parametrize("name", ["arithmetic", "reasoning-gym:knights_knaves", "reasoning-gym:sokoban"])
def test_a_runs_words_are_put_around_each_problem(chat_model: Path, name: str, system_prompt: str) -> None:
    suffix = "\nAnswer in <answer> tags."
    task = TaskConfig(name=name, system_prompt=system_prompt, prompt_suffix=suffix)
    codec = PromptCodec.of_run(HubConfig(task=task), chat_model)
    problem = make_task(name, {}).sample(5)
    ids = codec.encode_prompt(problem.prompt).tolist()
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    conversation = [*system, {"role": "user", "content": problem.prompt + suffix}]
    reference: Any = AutoTokenizer.from_pretrained(chat_model)
    assert ids == reference.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"]
    assert ids.count(reference.eos_token_id) == len(conversation)
    assert codec.stop_ids[-1] == reference.eos_token_id
    assert codec.decode([*reference.encode("<answer>7</answer>"), reference.eos_token_id]) == "<answer>7</answer>"


def test_without_a_chat_template_the_system_prompt_stands_above_the_problem() -> None:
    codec = PromptCodec.load(resolve_base("builtin:tiny"), system_prompt="Add.", prompt_suffix="?")
    assert codec.decode(codec.encode_prompt("1+1=")) == "Add.\n\n1+1=?"


def test_a_template_without_a_system_turn_is_reported(chat_model: Path) -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    (chat_model / "chat_template.jinja").write_text(refuses + CHATML)
    assert len(PromptCodec.load(chat_model).encode_prompt("1+1="))
    with pytest.raises(ConfigError, match="chat template") as caught:
        PromptCodec.load(chat_model, system_prompt="Add.").encode_prompt("1+1=")
    assert "task.system_prompt" in str(caught.value)


@pytest.mark.parametrize(
    ("dated", "shown"),
    [
        ("{{ date_string if date_string is defined else strftime_now('%d %b %Y') }}", "26 Jul 2024"),
        ("{{ strftime_now('%Y-%m-%d') }}", "2024-07-26"),
        ("{{ strftime_now('%B %d, %Y') }}", "July 26, 2024"),
        ("{% set now = strftime_now('%H:%M:%S.%f') %}{{ now }}", "00:00:00.000000"),
        ("{{ strftime_now('%s') | int }}", "1721"),
        ("{{ strftime_now(format='%A, %j, week %V %z') }}", "Friday, 208, week 30 +0000"),
        ("{% if strftime_now is defined %}{{ strftime_now('%c') }}{% endif %}", "Fri Jul 26 00:00:00 2024"),
    ],
)
def test_a_template_that_shows_the_date_gives_the_same_prompt_on_any_day(
    chat_model: Path, dated: str, shown: str
) -> None:
    (chat_model / "chat_template.jinja").write_text(dated + CHATML)
    codec = PromptCodec.load(chat_model)
    assert codec.decode(codec.encode_prompt("1+1=")).startswith(shown)
    assert codec.decode(observation(codec, "1+1=", after=codec.stop_ids[0])).count("1+1=") == 1


def with_post_processor(model: Path, before: list[str], behind: list[str]) -> Path:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    special = [(token, tokenizer.token_to_id(token)) for token in {*before, *behind}]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join([*before, "$A", *behind]), special_tokens=special
    )
    tokenizer.save(str(model / "tokenizer.json"))
    return model


@pytest.mark.parametrize(
    ("before", "behind"),
    [
        ([], ["<eos>"]),
        (["<unk>"], []),
        (["<unk>"], ["<eos>"]),
        (["<unk>"], ["<eos>", "<eos>"]),
        ([], ["<unk>"]),
        (["<eos>"], ["<unk>", "<eos>"]),
        ([], []),
    ],
)
@pytest.mark.parametrize("text", ["1+1=", "a<eos>", ""])
def test_nothing_stands_behind_a_prompt_without_a_template(
    model: Path, before: list[str], behind: list[str], text: str
) -> None:
    codec = PromptCodec.load(with_post_processor(model, before, behind))
    plain = PromptCodec.load(resolve_base("builtin:tiny")).encode_prompt(text).tolist()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    expected = [*map(tokenizer.token_to_id, before), *plain]
    assert codec.encode_prompt(text).tolist() == expected
    assert observation(codec, "1+1=", after=-1).tolist() == codec.encode_prompt("1+1=").tolist()[len(before) :]


def test_a_berts_post_processor_adds_nothing_behind(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    eos, unk = (("<eos>", tokenizer.token_to_id("<eos>")), ("<unk>", tokenizer.token_to_id("<unk>")))
    for made in (processors.BertProcessing(eos, unk), processors.RobertaProcessing(eos, unk)):
        tokenizer.post_processor = made
        tokenizer.save(str(model / "tokenizer.json"))
        assert PromptCodec.load(model).decode(PromptCodec.load(model).encode_prompt("1+1=")) == "1+1="
        ids = PromptCodec.load(model).encode_prompt("1+1=").tolist()
        assert (ids[0], len(ids)) == (unk[1], 5)


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("Hello!", "omits the user's message"),
        ("{# nothing #}", "omits the user's message"),
        ("{% if false %}{{ messages[0].content }}{% endif %}", "omits the user's message"),
        ("{{ messages[0].role }}", "omits the user's message"),
        ("{% for part in messages[0].content %}{{ part.text }}{% endfor %}", "omits the user's message"),
        ("{% for m in messages if m.role == 'human' %}{{ m.content }}{% endfor %}", "omits the user's message"),
        ("{{ messages[0].content", "cannot be rendered"),
        ("{{ messages[7].content }}", "cannot be rendered"),
        ("{{ 1 // 0 }}{{ messages[0].content }}", "cannot be rendered"),
        ("{{ messages[0].content.index('zzz') }}", "cannot be rendered"),
        ("{{ messages.__class__.__mro__ }}", "cannot be rendered"),
        ("{{ strftime_now(5) }}", "cannot be rendered"),
    ],
)
def test_a_template_that_gives_no_prompt_is_refused_at_the_start(chat_model: Path, template: str, what: str) -> None:
    (chat_model / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match=what) as caught:
        PromptCodec.of_run(HubConfig(), chat_model)
    assert caught.value.do


def test_a_tokenizer_that_makes_no_tokens_of_a_prompt_is_refused(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (Tokenizer(models.BPE({"é": 0}, []))).save(str(model / "tokenizer.json"))
    with pytest.raises(ConfigError, match="as no tokens"):
        PromptCodec.of_run(HubConfig(), model)


@pytest.mark.parametrize("template", [CHATML, "<|im_end|>" + CHATML, "{{ messages[0].content }}<|im_end|>"])
def test_a_template_with_a_token_that_the_model_lacks_is_refused_at_the_start(chat_model: Path, template: str) -> None:
    (chat_model / "chat_template.jinja").write_text(template)
    PromptCodec.of_run(HubConfig(), chat_model)
    change(chat_model / "generation_config.json", eos_token_id=5)
    for size in (256, 257):
        change(chat_model / "config.json", vocab_size=size)
        with pytest.raises(ConfigError, match="a token that the model does not have") as caught:
            PromptCodec.of_run(HubConfig(), chat_model)
        assert f"vocab_size = {size}" in str(caught.value) and "<|im_" in str(caught.value)


@pytest.mark.parametrize("text", ["   ", "a   b", "1+1=   "])
def test_a_text_with_a_token_that_the_model_lacks_is_refused(chat_model: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(chat_model / "tokenizer.json"))
    tokenizer.add_tokens(["   "])
    tokenizer.save(str(chat_model / "tokenizer.json"))
    codec = PromptCodec.of_run(HubConfig(), chat_model)
    for encode in (codec.encode_prompt, lambda said: observation(codec, said, after=-1)):
        with pytest.raises(ConfigError, match="a token that the model does not have") as caught:
            encode(text)
        assert "id 258 ('   ')" in str(caught.value)


@pytest.mark.parametrize("size", [None, "many", 0, -5, 2.5, True])
def test_a_model_without_a_vocabulary_size_is_refused(model: Path, size: object) -> None:
    change(model / "config.json", vocab_size=size)
    with pytest.raises(ConfigError, match="no valid vocabulary size"):
        PromptCodec.load(model)
    change(model / "config.json", text_config={"vocab_size": 99}, vocab_size=None)
    assert PromptCodec.load(model).stop_ids == (1,)


def test_stop_tokens_that_the_model_lacks_do_not_count(model: Path) -> None:
    change(model / "generation_config.json", eos_token_id=[1, 99, 100_000, -1])
    assert PromptCodec.load(model).stop_ids == (1,)
    change(model / "tokenizer_config.json", eos_token=None)
    change(model / "generation_config.json", eos_token_id=[99])
    with pytest.raises(ConfigError, match="end-of-sequence") as caught:
        PromptCodec.load(model)
    assert "eos_token_id = 99" in str(caught.value)


def test_tools_are_shown_by_the_tool_template(chat_model: Path) -> None:
    folder = chat_model / "additional_chat_templates"
    folder.mkdir()
    (chat_model / "chat_template.jinja").write_text(CHATML)
    (folder / "tool_use.jinja").write_text("{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML)
    codec = PromptCodec.load(chat_model)
    tool = {"type": "function", "function": {"name": "calculate"}}
    assert "calculate" not in codec.render_prompt("hm")
    assert '"calculate"' in codec.with_tools([tool]).render_prompt("hm")


@pytest.mark.parametrize(
    ("prompt", "tokens", "has_room"),
    [
        ("1+1=", 4, True),
        ("1+1=", 3, False),
        ("1" * 64, 8, False),
        ("1" * 8, 8, True),
        ("1" * 9, 8, False),
        ("1+1=" * 2_500_000, 200, False),
        (" " * 10_000_000, 200, False),
        ("", 0, True),
        ("1", -5, False),
    ],
)
def test_the_room_for_a_prompt_is_computed_quickly(prompt: str, tokens: int, has_room: bool) -> None:
    began = time.process_time()
    assert PromptCodec.load(resolve_base("builtin:tiny")).has_room(prompt, tokens=tokens) is has_room
    assert time.process_time() - began < 1


def test_a_template_that_fails_is_a_config_error(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ raise_exception('a system message is needed') }}")
    with pytest.raises(ConfigError, match="chat template") as caught:
        PromptCodec.load(model).encode_prompt("1+1=")
    assert "a system message is needed" in str(caught.value)


def test_stop_ids_come_from_the_generation_config_and_the_tokenizer(model: Path) -> None:
    change(model / "generation_config.json", eos_token_id=[7, 5])
    assert PromptCodec.load(model).stop_ids == (1, 5, 7)
    (model / "generation_config.json").unlink()
    change(model / "config.json", eos_token_id=9)
    assert PromptCodec.load(model).stop_ids == (1, 9)
    change(model / "tokenizer_config.json", eos_token={"content": "<unk>"})
    assert PromptCodec.load(model).stop_ids == (2, 9)


def test_a_model_without_an_end_is_refused(model: Path) -> None:
    for name in ("generation_config.json", "config.json"):
        change(model / name, eos_token_id=None)
    change(model / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ConfigError, match="end-of-sequence"):
        PromptCodec.load(model)


def test_a_missing_or_damaged_tokenizer_is_named(model: Path) -> None:
    (model / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged") as caught:
        PromptCodec.load(model)
    assert "generation_config.json" in str(caught.value)
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        PromptCodec.load(model)
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="no fast tokenizer"):
        PromptCodec.load(model)


def test_a_directory_with_config_and_safetensors_is_used_directly(model: Path) -> None:
    assert resolve_base(str(model)) == model


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_directory_without_config_or_safetensors_is_refused(model: Path, missing: str) -> None:
    (model / missing).unlink()
    (model / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ConfigError, match="contains no model"):
        resolve_base(str(model))


@pytest.mark.parametrize("reference", ["builtin:huge", "/no/such/directory", "./nothing", "~/no-such-model"])
def test_an_unknown_base_reference_is_refused(reference: str) -> None:
    with pytest.raises(ConfigError, match="base model does not exist"):
        resolve_base(reference)


def test_a_malformed_id_is_refused_before_any_connection() -> None:
    with pytest.raises(ConfigError, match="cannot be downloaded"):
        resolve_base("one/two/three")


def run_offline(code: str, hub_home: Path) -> str:
    """Run `code` in a process that can use only the Hugging Face cache in `hub_home`, and return its output."""
    environment = {**os.environ, "HF_HOME": str(hub_home), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_a_model_id_resolves_to_its_cached_snapshot(model: Path, tmp_path: Path) -> None:
    cached = tmp_path / "home" / "hub" / "models--someone--adder"
    revision = "0123456789012345678901234567890123456789"
    shutil.copytree(model, cached / "snapshots" / revision)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(revision)
    references = ("someone/adder", "someone/adder@main", f"someone/adder@{revision}")
    code = (
        "from echo_hub.run.base_files import model_hub_source, resolve_base\n"
        f"for reference in {references!r}:\n"
        "    directory = resolve_base(reference)\n"
        "    print(directory, model_hub_source(reference, directory))"
    )
    expected = f"{cached / 'snapshots' / revision} someone/adder@{revision}"
    assert run_offline(code, tmp_path / "home").splitlines() == [expected] * 3


@pytest.mark.parametrize(
    "place",
    ["model", "snapshots/{commit}", "models--owner--other/snapshots/{commit}", "models--owner--name/snapshots/main"],
)
def test_a_model_from_elsewhere_has_no_source_for_nodes(tmp_path: Path, place: str) -> None:
    with pytest.raises(ConfigError, match="model hub"):
        model_hub_source("owner/name", tmp_path / place.format(commit="0a" * 20))


def test_an_id_that_cannot_be_fetched_is_a_config_error(tmp_path: Path) -> None:
    code = (
        "from echo_hub.run.base_files import resolve_base; from echo_shared.errors import ConfigError\n"
        "try: resolve_base('someone/else')\n"
        "except ConfigError as error: print(error)"
    )
    printed = run_offline(code, tmp_path)
    assert "cannot be downloaded" in printed
    assert "someone/else" in printed


def test_neither_codec_nor_template_loads_torch(model: Path) -> None:
    (model / "chat_template.jinja").write_text(TEMPLATE)
    code = (
        "import sys; from echo_hub.run.base_files import resolve_base\n"
        "from echo_hub.run.base_model import PromptCodec\n"
        f"PromptCodec.load(resolve_base({str(model)!r})).encode_prompt('1+1='); print('torch' in sys.modules)"
    )
    assert run_offline(code, model) == "False"
