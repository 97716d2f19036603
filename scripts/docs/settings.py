"""Reference of the settings of hub and node, generated from their models."""

from __future__ import annotations

from echo_hub.config.sections import HubConfig
from echo_node.config import NodeConfig
from echo_shared.described import Described
from scripts.docs import field_types
from scripts.docs.markdown import code, paragraphs, table, text


def hub_page() -> str:
    """Return a page of the sections of RUN/config.toml."""
    parts = [
        "# Settings of a hub\n\n"
        "`echo-hub init RUN` writes all settings to `RUN/config.toml`. Defaults < that file < environment < flags: "
        "`[training]` `steps` is `ECHO_HUB_TRAINING__STEPS` in the environment. "
        "`echo-hub serve RUN --dry-run` prints the resolved settings.\n\n"
    ]
    for name, field in HubConfig.model_fields.items():
        assert isinstance(field.annotation, type) and issubclass(field.annotation, Described)
        parts.append(_section(f"[{name}]", name, field.annotation))
        for key, nested in field.annotation.model_fields.items():
            for model in field_types.models_in(nested.annotation):
                assert issubclass(model, Described)
                parts.append(_section(f"[{name}.{key}.KEY]", model.__name__.lower(), model))
    return "".join(parts)


def node_page() -> str:
    """Return a page of a node's config.toml."""
    tables = {
        name: field.annotation
        for name, field in NodeConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Described)
    }
    parts = [
        "# Settings of a node\n\n"
        "`echo-node config list` prints all settings with their current values; `echo-node config set KEY VALUE` sets "
        "one, for example `manners.KEY` in the table `[manners]`. Defaults < `config.toml` < environment < flags: "
        "`threads` is `ECHO_NODE_THREADS` in the environment, `manners.cpu` is `ECHO_NODE_MANNERS__CPU`.\n\n",
        _section("At the top", "top", NodeConfig, without=set(tables)),
    ]
    parts += [_section(f"[{name}]", name, kind) for name, kind in tables.items()]
    return "".join(parts)


def _section(title: str, anchor: str, model: type[Described], *, without: set[str] | None = None) -> str:
    said = model.descriptions()
    rows = [
        (code(name), field_types.of_field(field), field_types.default(field), text(said.get(name)))
        for name, field in model.model_fields.items()
        if name not in (without or ())
    ]
    about = "" if without else paragraphs(model.__doc__)
    return f"## {title} {{ #{anchor} }}\n\n{about}{table(('setting', 'type', 'default', 'meaning'), rows)}"
