"""Training steps: a fleet, the gather included, beside one ordinary PyTorch run of the same work; memory by fleet size."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from selfless.bench.eager import Loop
from selfless.bench.engine import EngineFleet, Workload, cnn, mlp
from selfless.bench.limits import limit_of
from selfless.bench.plan import Plan
from selfless.bench.table import Row, format_number, make_row, make_target
from selfless.bench.timing import measure_memory, time_in_turn

EAGER = {"eager, MAS in the loss": False, "eager, MAS after the step": True}


def run(plan: Plan) -> Iterator[Row]:
    """Yield the rows of both networks."""
    for workload, samples in ((mlp(), plan.mlp_samples), (cnn(), plan.cnn_samples)):
        yield from _network_rows(plan, workload, samples)


def _network_rows(plan: Plan, workload: Workload, samples: int) -> Iterator[Row]:
    title, steps = f"{workload.title}, batch {plan.batch}", plan.eager_steps_of(samples)
    eager, memory = {}, {}
    for name, implicit in EAGER.items():
        eager[name], memory[name] = measure_memory(lambda i=implicit: _warm_loop(plan, workload, samples, i), plan.device)  # type: ignore[misc]
    for members in plan.fleet_sizes:
        plan.say(f"{title}: steps of a fleet of {members}")
        try:
            fleet, fleet_bytes = measure_memory(lambda n=members: _warm_fleet(plan, workload, n, samples), plan.device)  # type: ignore[misc]
            limit = limit_of(workload, members, plan.batch, plan.device)
            times = time_in_turn({**eager, "fleet": fleet.train_epoch, "limit": limit}, plan.rounds, plan.device)
        except torch.cuda.OutOfMemoryError:
            yield make_row(f"{title}, fleet of {members}", says="out of memory", network=workload.model, members=members)
            break
        step, eager_step = times.best("fleet") / fleet.steps, min(times.best(name) for name in eager) / steps
        if members == plan.fleet_sizes[0]:
            for name in eager:
                yield _eager_row(workload, f"{title}, {name}", times.rounds[name], steps, memory[name])
        ratio = members * eager_step / step
        has_target = plan.device.type == "cuda" and members == 64 and workload.model == "mlp-128"
        yield make_row(
            f"{title}, fleet of {members}",
            step,
            rate=f"{format_number(1 / step)} steps/s = {format_number(members / step)} run-steps/s",
            says=f"a run-step {format_number(ratio)}× as fast as eager",
            memory=fleet_bytes,
            target=make_target(ratio, "≥", 300, "×") if has_target else None,
            network=workload.model,
            members=members,
            run_step_seconds=step / members,
            eager_step_seconds=eager_step,
            times_eager=ratio,
            of_limit=times.best("limit") / step,
            steps=fleet.steps,
            eager_steps=steps,
            batch=plan.batch,
            rounds=times.rounds,
        )
        del fleet, limit  # before the next, larger ones are made


def _eager_row(workload: Workload, title: str, rounds: list[float], steps: int, memory: int) -> Row:
    step = min(rounds) / steps
    rate = f"{format_number(1 / step)} steps/s"
    return make_row(title, step, rate=rate, memory=memory, network=workload.model, members=0, steps=steps, rounds=rounds)


def _warm_loop(plan: Plan, workload: Workload, samples: int, implicit: bool) -> Loop:
    loop = Loop(workload, samples, plan.batch, plan.eager_steps_of(samples), plan.device, implicit)
    loop()
    return loop


def _warm_fleet(plan: Plan, workload: Workload, members: int, samples: int) -> EngineFleet:
    fleet = EngineFleet(workload, members, samples, plan.device, batch=plan.batch)
    fleet.train_epoch()
    return fleet
