"""The Jinja2 environment of all pages. Autoescaping is always on, and no template marks a text as safe."""

from __future__ import annotations

from typing import Any

import jinja2

from echo_hub.dashboard import formats
from echo_hub.dashboard.actions import buttons
from echo_hub.dashboard.assets import Assets
from echo_hub.dashboard.fleet import standing_of, state_of, why_idle
from echo_shared.wire.messages.engines import precision_in_words
from echo_shared.wire.messages.receipts import check_in_words


def environment(assets: Assets) -> jinja2.Environment:
    env = jinja2.Environment(
        loader=jinja2.PackageLoader("echo_hub.dashboard"),
        autoescape=True,
        auto_reload=False,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for function in (
        formats.ago,
        formats.clock,
        formats.count,
        formats.date,
        formats.display_name,
        formats.duration,
        formats.excerpt,
        formats.fixed,
        formats.in_unit,
        formats.iso,
        formats.dollars,
        formats.path_part,
        formats.percent,
        formats.rate,
        formats.scientific,
        formats.size,
        formats.visible,
        check_in_words,
        precision_in_words,
    ):
        env.filters[function.__name__] = function
    for of_node in (buttons, standing_of, state_of, why_idle):
        env.globals[of_node.__name__] = of_node
    env.globals["asset"] = assets.address
    env.globals["serves_tenants"] = False
    return env


class Template:
    """A template, compiled when it is first used. Compiling all of them would add tenths of a second to the hub's
    start."""

    def __init__(self, templates: jinja2.Environment, name: str) -> None:
        self._templates = templates
        self._name = name

    def render(self, *args: Any, **kwargs: Any) -> str:
        """Render the template, with the arguments of `jinja2.Template.render`. Thread-safe."""
        return self._templates.get_template(self._name).render(*args, **kwargs)
