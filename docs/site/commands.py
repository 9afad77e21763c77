"""The reference of the command line, written from the commands themselves, so that it is never out of date."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

TITLE = """# Every command and option

After this page you know every option of every command. This page is made from the program, so it equals `--help`. For
an explanation with examples read [Command line](cli.md).

"""


def reference() -> str:
    """Return the page: one section for each command, with its options and examples."""
    import typer

    from selfless.cli import app

    return TITLE + "\n".join(section(name, command) for name, command in commands(typer.main.get_command(app), "selfless"))


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield every command with its full name; a group itself is not one."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for sub in command.commands.values():
        yield from commands(sub, f"{name} {sub.name}")


def section(name: str, command: Any) -> str:
    """Return the section of one command."""
    pieces = " ".join(command.collect_usage_pieces(command.context_class(command, info_name=name)))
    usage = f"{name} {re.sub(r'[{}]', '', pieces).replace('[[', '[').replace(']]', ']').replace('…...', '…')}"
    lines = [f"## {name.removeprefix('selfless ')}", "", _text(command.help), "", "```text", usage, "```", ""]
    panels: dict[str, list[Any]] = {}
    for parameter in command.params:
        if parameter.name != "help" and not getattr(parameter, "hidden", False):
            kind = "argument" if parameter.param_type_name == "argument" else "option"
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(parameter)
    for panel, parameters in panels.items():
        lines += [f"| {panel.lower()} | meaning | default |", "| --- | --- | --- |"]
        lines += [f"| {_names(parameter)} | {_cell(parameter.help or '')} | {_default(parameter)} |" for parameter in parameters]
        lines.append("")
    examples = re.sub(r"\[/?(?:bold|dim)\]", "", command.epilog or "").partition("\n\n")[2]
    shown = [line.strip() for line in examples.replace("\\[", "[").splitlines() if line.strip()]
    return "\n".join([*lines, "```bash", *shown, "```", ""] if shown else lines)


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{(parameter.metavar or parameter.name).strip('[]').upper()}`"
    names = [*parameter.opts, *parameter.secondary_opts]
    return ", ".join(f"`{option}{'' if parameter.is_flag else ' ' + _value(parameter)}`" for option in names)


def _value(parameter: Any) -> str:
    """Return the kind of value that an option takes, as `--help` shows it."""
    if parameter.metavar:
        return str(parameter.metavar)
    kind = parameter.type_descriptor.annotation
    return f"<{kind.__name__ if isinstance(kind, type) and not get_args(kind) else kind}>"


def _default(parameter: Any) -> str:
    shown = getattr(parameter, "show_default", None)
    if isinstance(shown, str):
        return f"`{shown}`" if re.fullmatch(r"[\w.:-]+", shown) else _cell(shown)
    value = None if callable(parameter.default) else parameter.default
    if parameter.required or value is None or isinstance(value, bool) or shown is False or type(value).__name__ == "Sentinel":
        return "required" if parameter.required else ""
    return f"`{' '.join(map(str, value)) if isinstance(value, (list, tuple)) else value}`" if value not in ((), [], "") else ""


def _text(help_text: str | None) -> str:
    """Return the help of a command as paragraphs."""
    return "\n\n".join(" ".join(_cell(part).split()) for part in re.split(r"\n\s*\n|\x0c", help_text or "") if part.strip())


def _cell(text: str) -> str:
    return re.sub(r"\[/?(?:bold|dim)\]", "", text).replace("\\[", "[").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ").strip()
