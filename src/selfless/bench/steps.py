"""Steps a second of a fleet, the gather inside, beside one ordinary PyTorch run of the same work; memory by fleet size."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from selfless.bench.eager import Loop
from selfless.bench.plan import Plan
from selfless.bench.rig import Network, Rig, cnn, mlp
from selfless.bench.rows import Row, aim, many, row
from selfless.bench.timing import interleaved, peak

EAGER = {"eager, MAS in the loss": False, "eager, MAS after the step": True}


def run(plan: Plan) -> Iterator[Row]:
    for network, samples in ((mlp(), plan.mlp_samples), (cnn(), plan.cnn_samples)):
        yield from _network(plan, network, samples)


def _network(plan: Plan, network: Network, samples: int) -> Iterator[Row]:
    title, steps = f"{network.title}, batch {plan.batch}", plan.eager_steps_of(samples)
    eager, memory = {}, {}
    for name, implicit in EAGER.items():
        eager[name], memory[name] = peak(lambda i=implicit: _warm_loop(plan, network, samples, i), plan.device)  # type: ignore[misc]
    for members in plan.fleets:
        plan.say(f"{title}: steps of a fleet of {members}")
        try:
            rig, held = peak(lambda n=members: _warm_rig(plan, network, n, samples), plan.device)  # type: ignore[misc]
            times = interleaved({**eager, "fleet": rig.epoch}, plan.rounds, plan.device)
        except torch.cuda.OutOfMemoryError:
            yield row(f"{title}, fleet of {members}", says="out of memory", network=network.model, members=members)
            break
        step, alone = times.best("fleet") / rig.steps, min(times.best(name) for name in eager) / steps
        if members == plan.fleets[0]:
            for name in eager:
                yield _eager_row(network, f"{title}, {name}", times.rounds[name], steps, memory[name])
        ratio = members * alone / step
        wanted = plan.device.type == "cuda" and members == 64 and network.model == "mlp-128"
        yield row(
            f"{title}, fleet of {members}",
            step,
            rate=f"{many(1 / step)} steps/s = {many(members / step)} run-steps/s",
            says=f"a run-step {many(ratio)}× as fast as eager",
            memory=held,
            target=aim(ratio, "≥", 300, "×") if wanted else None,
            network=network.model,
            members=members,
            run_step_seconds=step / members,
            eager_step_seconds=alone,
            times_eager=ratio,
            steps=rig.steps,
            eager_steps=steps,
            batch=plan.batch,
            rounds=times.rounds,
        )
        del rig


def _eager_row(network: Network, title: str, rounds: list[float], steps: int, memory: int) -> Row:
    step = min(rounds) / steps
    return row(title, step, rate=f"{many(1 / step)} steps/s", memory=memory, network=network.model, members=0, steps=steps, rounds=rounds)


def _warm_loop(plan: Plan, network: Network, samples: int, implicit: bool) -> Loop:
    loop = Loop(network, samples, plan.batch, plan.eager_steps_of(samples), plan.device, implicit)
    loop()
    return loop


def _warm_rig(plan: Plan, network: Network, members: int, samples: int) -> Rig:
    rig = Rig(network, members, samples, plan.device, batch=plan.batch)
    rig.epoch()
    return rig
