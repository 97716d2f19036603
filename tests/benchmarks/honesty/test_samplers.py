from pathlib import Path

from benchmarks.honesty.samplers import STEPS, ShortRun


def test_a_run_that_is_opened_again_has_the_trained_adapters(tmp_path: Path) -> None:
    ShortRun(tmp_path, seed=1, max_tokens=2).train(groups=1)
    adapters = ShortRun(tmp_path, seed=1, max_tokens=10).adapters
    assert list(adapters) == list(range(1, STEPS + 1))
    assert all((adapter / "adapter_model.safetensors").is_file() for adapter in adapters.values())
