from scripts.ci.requirements import NEED_TORCH, TEST_TOOLS, name_of, requirements


def test_hub_and_node_requirements_leave_out_torch() -> None:
    names = {name_of(text) for text in requirements(["hub"])}
    assert {"numpy", "aiohttp", "sympy", "libtorrent"} | TEST_TOOLS <= names
    assert not names & NEED_TORCH


def test_an_extra_adds_its_requirements() -> None:
    assert "mlx-lm>=0.32; sys_platform != 'win32'" in set(requirements(["mlx"])) - set(requirements([]))


def test_names_end_before_versions_extras_and_markers() -> None:
    texts = ["a-b>=1", "psycopg[binary]>=3.2", "x; sys_platform == 'linux'", "Plain"]
    assert [name_of(text) for text in texts] == ["a-b", "psycopg", "x", "plain"]
