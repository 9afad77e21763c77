"""The command line. Heavy imports happen inside the commands: `selfless --help` answers at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfless import __version__, cli_data, cli_reproduce, cli_tune
from selfless.cli_common import HOW, AsJson, DataDir, Device, Force, Out, Workers, told, trained

if TYPE_CHECKING:
    from selfless.spec import Result

app = typer.Typer(
    help="Continual learning that leaves room: MAS, EWC, SI and their rivals beside SLNID (Selfless Sequential Learning, ICLR 2019).",
    epilog="Examples:  selfless run --sparsify slnid:1e-3  ·  selfless run --help  ·  selfless report results",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cli_data.app, name="data")
app.command(epilog=cli_reproduce.EXAMPLES)(cli_reproduce.reproduce)
app.command(epilog=cli_tune.EXAMPLES)(cli_tune.tune)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"selfless {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None: ...


_WHAT, _TRAIN = "What", "Training"


def _flag(text: str, default: str, panel: str) -> Any:
    """An option that may also come from --config: None when it is not given, its real default only shown."""
    return typer.Option(None, help=text, show_default=default, rich_help_panel=panel)


_EXAMPLES = """[bold]Examples[/bold]

  selfless run                                                     [dim]# five permuted-MNIST tasks with MAS[/dim]
  selfless run --sparsify slnid:1e-3 --seeds 5                     [dim]# mean ± std over five seeds[/dim]
  selfless run --preserve mas:0.1,estimator=per-batch              [dim]# the authors' estimate of Ω[/dim]
  selfless run --stream split-cifar-100 --model cnn-256 --tasks 10 --epochs 50 --preserve mas:1 --sparsify slnid:3e-3
  selfless run --preserve lwf:1 --stream split-mnist --scenario class            [dim]# one head over all classes seen so far[/dim]
  selfless run --stream folders:my/tasks --model mypkg.nets:build  [dim]# your data and your network[/dim]
  selfless run --config my.toml --lr 0.03 --json"""


@app.command(epilog=_EXAMPLES)
def run(
    stream: str | None = _flag("Tasks: permuted-mnist, split-cifar-100, …, folders:PATH, arrays:FILE.npz.", "permuted-mnist", _WHAT),
    model: str | None = _flag("Network: mlp-N, cnn-N, vgg-slim, alexnet, mlp-N-maxout, mlp-N-lwta, module:factory.", "mlp-128", _WHAT),
    preserve: str | None = _flag(
        "What keeps old tasks: mas:0.1, mas-local, ewc:10, ewc-online, si:1, rwalk, lwf:1, ebll:1, imm, packnet:0.5, hat:0.75, "
        "finetune (none), as name\\[:strength\\[,option=value]]; module:Class for your own.",
        "mas:0.1",
        _WHAT,
    ),
    sparsify: str | None = _flag("What leaves room: slnid:1e-3, slni, snid, sni, l1-rep, decov, …, module:Class (yours).", "none", _WHAT),
    tasks: int | None = _flag("The first so many tasks.", "5 permuted or rotated ones, else all", _WHAT),
    layers: str | None = _flag("Where the sparsifier acts: hidden, all.", "hidden", _WHAT),
    scenario: str | None = _flag(
        "What is known when a task is judged: task (which one), domain (nothing; tasks share outputs), class (nothing; among all classes).",
        "task",
        _WHAT,
    ),
    stream_option: Annotated[
        list[str] | None, typer.Option(help="key=value for the stream, repeatable: classes_per_task=5.", rich_help_panel=_WHAT)
    ] = None,
    model_option: Annotated[
        list[str] | None, typer.Option(help="key=value for the network, repeatable: dropout=0.5.", rich_help_panel=_WHAT)
    ] = None,
    epochs: int | None = _flag("Epochs a task.", "10", _TRAIN),
    batch: int | None = _flag("Samples a step.", "200", _TRAIN),
    lr: float | None = _flag("Learning rate of SGD.", "0.01", _TRAIN),
    momentum: float | None = _flag("", "0.9", _TRAIN),
    weight_decay: float | None = _flag("", "0", _TRAIN),
    schedule: str | None = _flag("constant, cosine, plateau.", "constant", _TRAIN),
    augment: str | None = _flag("none, flip, crop-flip, resized.", "none", _TRAIN),
    ramp: int | None = _flag("Epochs of each task (fewer than all) in which the sparsifier grows to its strength.", "0, at once", _TRAIN),
    anchor: str | None = _flag("implicit (stable at any strength), explicit (the paper's).", "implicit", _TRAIN),
    alpha: str | None = _flag("Neuron importance over tasks: sum, mean.", "sum", _TRAIN),
    select: str | None = _flag("Epoch that is kept: last, held-out, best-on-test (marked).", "last", _TRAIN),
    held_out: float | None = _flag("Share of the training data kept aside.", "0; 0.1 where the run needs one", _TRAIN),
    precision: str | None = _flag("Of products on a GPU: tf32, fp32, bf16; a CPU: float32, or bf16 where it can.", "tf32", _TRAIN),
    seed: int | None = _flag("The first seed.", "0", _TRAIN),
    seeds: int | None = _flag("How many seeds, from --seed up.", "1", _TRAIN),
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with the flags of What and Training, seeds, out, data_dir, device, workers, budget; flags win.",
            rich_help_panel=HOW,
        ),
    ] = None,
    out: Out = None,
    data_dir: DataDir = None,
    device: Device = None,
    workers: Workers = None,
    budget: str | None = _flag("Data kept in memory, as 2GB; what is larger streams from a memory map.", "all", HOW),
    engine: Annotated[str, typer.Option(help="Where fleets train: local.", rich_help_panel=HOW)] = "local",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Train a sequence of tasks and report accuracy, forgetting and the capacity that is left.

    A run is named by its settings: what is recorded already is shown, not trained again, and a run that was interrupted goes on.
    """
    with told(as_json):
        from selfless import config as configuration

        if engine != "local":
            raise ValueError(f"engine {engine!r} is not available in this version; use --engine local")
        flags = dict(locals())
        names = (
            "stream model preserve sparsify tasks layers scenario epochs batch lr momentum weight_decay schedule ramp augment anchor "
            "alpha select held_out precision seed seeds out data_dir device workers budget"
        ).split()
        given = {name: flags[name] for name in names}
        given["stream_options"] = configuration.options(stream_option, "--stream-option")
        given["model_options"] = configuration.options(model_option, "--model-option")
        plan = configuration.plan(config, given)
        results = trained(plan.runs, force=force, as_json=as_json, **plan.session)
        folder = Path(plan.session.get("out", "results"))
        _finish(results, folder, as_json)


def _finish(results: Sequence[Result], out: Path, as_json: bool) -> None:
    """The table, where the files are, and a non-zero exit if a run failed."""
    if as_json:
        from selfless.metrics import spread

        methods: dict[str, list[float]] = {}
        for r in results:
            methods.setdefault(r.run.method, []).extend([r.average] if r.status == "done" else [])
        spreads = {name: spread(values) if values else (float("nan"), float("nan")) for name, values in methods.items()}
        averages = {name: {"mean": _plain(mean), "std": _plain(std)} for name, (mean, std) in spreads.items()}
        payload = {"out": str(out), "averages": averages, "runs": [r.as_dict() for r in results]}
        if len(averages) == 1:
            payload["average"] = next(iter(averages.values()))
        typer.echo(json.dumps(payload))
    else:
        from rich.console import Console

        from selfless import report as reporting

        console = Console()
        console.print(reporting.terminal(results))
        console.print(str(reporting.headline(results)))
        for result in results:
            console.print(
                f"[dim]{result.run.method}, seed {result.run.seed}:[/dim] {out / result.run.key}", highlight=False, soft_wrap=True
            )
    failed = [r for r in results if r.status != "done"]
    for result in failed:
        typer.secho(f"failed: {result.run.method}, seed {result.run.seed}: {result.error}", fg=typer.colors.RED, err=True)
    if failed:
        raise typer.Exit(1)


def _plain(value: float) -> float | None:
    return value if value == value else None


@app.command(epilog="Example:  selfless demo --out demo")
def demo(
    out: Annotated[Path, typer.Option(help="Where results, pictures and the report go.")] = Path("demo"),
    data_dir: DataDir = None,
    device: Device = None,
    workers: Workers = None,
    quick: Annotated[bool, typer.Option(help="Two tasks, one epoch each: only to see that it works.")] = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Five permuted-MNIST tasks, MAS alone beside MAS + SLNID: a table, pictures and a report."""
    with told(as_json):
        from selfless.preserve import MAS
        from selfless.sparsify import SLNID, NoSparsifier
        from selfless.spec import Run

        size = {"tasks": 2, "epochs": 1} if quick else {"tasks": 5, "epochs": 10}
        runs = [Run(preserve=MAS(0.1), sparsify=s, **size) for s in (NoSparsifier(), SLNID(1e-3))]  # type: ignore[arg-type]
        session = {"data_dir": data_dir, "device": device or "auto", "workers": workers}
        if not as_json:
            typer.echo(f"Learning {size['tasks']} permuted-MNIST tasks one after another, with MAS alone and with MAS + SLNID.", err=True)
        results = trained(runs, force=force, as_json=as_json, out=out, **session)
        from selfless.report import plots, write

        plots.save_png(plots.per_task(results), out / "accuracy.png")
        plots.save_png(plots.capacity(results), out / "capacity.png")
        path = write(results, out / "report.html", title="selfless: the demo")
        _finish(results, out, as_json)
        if not as_json:
            typer.echo(f"picture: {out / 'accuracy.png'}\nreport:  {path}")


@app.command(
    epilog="Examples:  selfless report results  ·  selfless report results --format latex  ·  selfless report results --figures figures"
    "  ·  selfless report mine --against results/reproduction"
)
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of results.")] = Path("results"),
    to: Annotated[Path | None, typer.Option("--to", help="The page to write.", show_default="DIR/report.html")] = None,
    form: Annotated[str, typer.Option("--format", help="html, or md, csv, latex to standard output.")] = "html",
    figures: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the experiments' figures there instead, PNG and PDF.")] = None,
    other: Annotated[
        Path | None, typer.Option("--against", metavar="DIR", help="Compare with the experiments recorded there instead, as Markdown.")
    ] = None,
) -> None:
    """One self-contained HTML page of everything recorded in DIR, or its tables for a paper. Experiments come first."""
    with told():
        from selfless import report as reporting
        from selfless.report import experiments as experimental
        from selfless.runner.store import Store

        if other is not None:
            from selfless.report import against

            mine, theirs = (sorted(against.records(one), key=_place) for one in (folder, other))
            names = (folder.resolve().name, other.resolve().name)
            typer.echo(against.against(mine, theirs, names if names[0] != names[1] else (str(folder), str(other))))
            return
        records = [experimental.marked(record, *_today(record)) for record in sorted(experimental.load(folder), key=_place)]
        results = Store(folder).all() if records else _recorded(folder)
        if figures is not None:
            from selfless.report.experiment_plots import save

            written = save(records, figures)
            if not written:
                raise ValueError(f"{folder} holds no experiment to draw; make one: selfless reproduce fig-2 --out {folder}")
            typer.echo(f"{len(written)} files in {figures}")
            return
        if form == "html":
            typer.echo(reporting.write(results, to or folder / "report.html", out=folder, experiments=records))
            return
        if form not in ("md", "csv", "latex"):
            raise ValueError(f"format {form!r} is unknown; choose html, md, csv or latex")
        name = {"md": "markdown"}.get(form, form)
        parts = [getattr(experimental, name)(records)] if records else []
        rest = [r for r in results if r.run.key not in experimental.keys(records)]
        if not records or (rest and form != "csv"):  # one table a CSV: that of the experiments, where there are any
            parts.append(getattr(reporting, name)(rest))
        typer.echo("\n".join(parts))


def _place(record: dict[str, Any]) -> tuple[bool, str, int]:
    """Ours before the paper's settings, each in the order of the paper; quick versions last."""
    from selfless.experiments import NAMES

    return record["quick"], record["profile"], NAMES.index(record["name"]) if record["name"] in NAMES else len(NAMES)


def _today(record: dict[str, Any]) -> tuple[set[str], dict[tuple[str, str], set[str]]]:
    """(the keys of the runs that the record's experiment may report as it is written today, those that its cells are chosen by); none for
    one that is gone."""
    from selfless.experiments import EXPERIMENTS, experiment
    from selfless.experiments.reproduce import declared, grids

    if record["name"] not in EXPERIMENTS:
        return set(), {}
    made = experiment(record["name"], record["profile"], quick=record["quick"], record=record)
    return declared(made, record["seeds"]), grids(made)


FEW = 12  # runs whose layers are all shown; of more, a summary


@app.command(epilog="Examples:  selfless capacity results  ·  selfless capacity results/KEY")
def capacity(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of results, or of one run.")] = Path("results"),
    as_json: AsJson = False,
) -> None:
    """How much room each recorded run has left after each task: free parameters and neurons, by layer; of many runs, a summary."""
    with told(as_json):
        results = _recorded(folder)
        if as_json:
            names = ("key", "stream", "model", "method", "seed")
            rows = [{name: getattr(r.run, name) for name in names} | {"capacity": r.capacity} for r in results]
            typer.echo(json.dumps({"runs": rows}))
            return
        from rich.console import Console
        from rich.table import Table

        if len(results) > FEW:
            from selfless.report import room

            Console().print(room(results))
            typer.echo(f"\n{len(results)} runs, means over seeds; the layers of one: selfless capacity {folder}/KEY; keys and all: --json")
            return
        for result in results:
            table = Table(title=f"{result.run.method}, seed {result.run.seed}: free, in %", title_justify="left")
            table.add_column("after task")
            for t in range(1, len(result.capacity) + 1):
                table.add_column(str(t), justify="right")
            for kind in ("neurons", "parameters"):
                layers: list[str] = list(result.capacity[-1][kind]) if result.capacity else []
                shown = {name: [free[kind][name] for free in result.capacity] for name in layers}
                shown["all"] = [free[f"free_{kind}"] for free in result.capacity]
                for name, shares in shown.items():
                    cells = ["–" if share is None else f"{100 * share:.1f}" for share in shares]
                    table.add_row(f"{kind}: {name}", *cells, style="bold" if name == "all" else None, end_section=name == "all")
            Console().print(table)


_BENCH_EXAMPLES = """[bold]Examples[/bold]

  selfless bench                                       [dim]# steps, importance, penalty, growth: one table[/dim]
  selfless bench --quick                               [dim]# a minute: a look, not a result[/dim]
  selfless bench --only penalty --device cpu --threads 2
  selfless bench --out results/bench/here              [dim]# bench.json and the plots, PNG and SVG[/dim]
  selfless bench --only sequence --out results/bench/gpu [dim]# whole sequences: needs a GPU, MNIST and CIFAR-100[/dim]
  selfless bench --peers                               [dim]# beside Avalanche: needs a checkout and benchmarks/peers/setup.sh[/dim]"""


@app.command(epilog=_BENCH_EXAMPLES)
def bench(
    only: Annotated[
        str | None,
        typer.Option(help="Parts, comma-separated: steps, importance, penalty, fleet, sequence, peers.", show_default="the first four"),
    ] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Other libraries too, each in its own environment.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, two rounds: only to see that it works.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write bench.json and plots there.", metavar="DIR", show_default="nothing")] = None,
    device: Device = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of PyTorch on the CPU.", show_default="PyTorch's choice")] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """What things cost on this machine, as ratios to plain PyTorch measured in the same run: interleaved rounds, the least time of each.

    Images are made up in memory; only sequence and peers need real data. A part that cannot be measured here says why.
    """
    with told(as_json, "stopped; with --out, what was measured so far is in bench.json"):
        import shlex

        import torch
        from rich.console import Console

        from selfless.bench.main import bench as measure
        from selfless.bench.main import chosen
        from selfless.bench.plan import plan
        from selfless.bench.table import table
        from selfless.runner.local import resolve_device

        parts, place = chosen(only, peers), torch.device(resolve_device(device or "auto"))
        if threads is not None:
            torch.set_num_threads(threads)
        console = Console(stderr=True, quiet=as_json)
        with console.status("") as status:
            tell = status.update if console.is_terminal else console.print
            sizes = plan(place, quick, data_dir, say=lambda what: tell(f"measuring {what}"))
            found = measure(parts, sizes, shlex.join(["selfless", *sys.argv[1:]]), out)
        if set(parts) == set(found["skipped"]):
            raise ValueError("nothing could be measured: " + "; ".join(f"{part}: {why}" for part, why in found["skipped"].items()))
        if as_json:
            typer.echo(json.dumps(found))
            return
        shown = Console(width=None if sys.stdout.isatty() else 180)
        shown.print(table(found))
        for part, why in found["skipped"].items():
            shown.print(f"{part}: skipped: {why}", soft_wrap=True, highlight=False)
        if out is not None:
            shown.print(f"written: {out / 'bench.json'}, and plots beside it", soft_wrap=True, highlight=False)


def _recorded(folder: Path) -> list[Result]:
    from selfless.runner.store import Store

    results = Store(folder).all()
    if not results:
        begun = sum(1 for _ in folder.glob("*/log.jsonl"))
        if begun:
            raise ValueError(f"{folder} holds no results, but {begun} unfinished; give the command that began them again")
        raise ValueError(f"{folder} holds no results; train something first: selfless run --out {folder}")
    return results


def main() -> None:
    app()


if __name__ == "__main__":
    main()
