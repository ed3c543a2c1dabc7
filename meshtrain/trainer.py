"""The training loop: config in, checkpoints and figures out. Each stage is a function that can be called alone.

config = load("examples/gpt_tiny.yaml")
result = train(config)
"""

import collections
import contextlib
import dataclasses
import hashlib
import math
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from meshtrain.checkpoint import JSON, Checkpointer
from meshtrain.config import Config
from meshtrain.data import (
    Batches,
    EvalBatches,
    TokenSource,
    abstract_batch,
    open_source,
    prefetch,
    to_global,
    unigram_entropy,
)
from meshtrain.distributed.link import StopFlag
from meshtrain.distributed.start import World, start
from meshtrain.engine import Engine, initialize, param_shapes
from meshtrain.errors import CheckpointError, ConfigError, TrainingError
from meshtrain.flops import mfu, model_flops_per_token, peak_flops
from meshtrain.logs import process_log
from meshtrain.mesh import claim_gpu_memory, make_mesh, use_virtual_devices
from meshtrain.metrics import Progress, Sinks, Throughput, open_sinks, show_logs
from meshtrain.optim import make_optimizer, make_schedule
from meshtrain.precision import Precision
from meshtrain.runs import Run, open_run
from meshtrain.state import TrainState
from meshtrain.target import Target, load_target
from meshtrain.terminal import show_path

Outcome = Literal["complete", "already complete", "stopped"]


@dataclasses.dataclass(frozen=True)
class Result:
    """How a call of `train` ended.

    Attributes:
        outcome: "stopped": a signal came, and the state was saved.
        step: updates done in the whole run.
        train_loss: mean per token of the last `num_averaged` updates, in nats; NaN where none was made.
        val_loss: mean per token over the fixed validation set, in nats; NaN without one.
        tokens_per_s: over the last log interval; NaN where none was measured.
        unigram: entropy of the validation tokens, each drawn by its frequency: what a model without context reaches.
        bits_per_byte: of val_loss; None where the bytes per token are not known.
        signum: the signal that stopped the run, or 0.
        is_main: this is process 0, which speaks for all.
    """

    outcome: Outcome
    step: int
    train_loss: float
    val_loss: float
    tokens_per_s: float
    unigram: float
    bits_per_byte: float | None
    path: Path
    signum: int = 0
    num_averaged: int = 0
    is_main: bool = True


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything of a run that does not change while it trains."""

    config: Config
    source: TokenSource
    target: Target
    engine: Engine
    batches: Batches
    eval_batches: EvalBatches | None


def build(config: Config) -> Job:
    """Opens the data, builds the model and lays it out: all that can go wrong before anything is computed.

    Raises:
        UserError: the config, the data, the model and the devices do not fit together.
    """
    claim_gpu_memory()
    if config.devices:
        use_virtual_devices(config.devices)
    data, train = config.data, config.train
    target = load_target(config)
    mesh = make_mesh(config.mesh.data, config.mesh.model)
    source = open_source(data, config.run.seed)
    batches = Batches(source.tokens, data.seq_len, train.global_batch, config.run.seed)
    if train.global_batch > batches.num_records:
        raise ConfigError(
            f"train.global_batch={train.global_batch} is more than the {batches.num_records} records of the data: each "
            "update would read some of them twice; lower it, or data.seq_len, or give more data"
        )
    eval_batches = None
    if source.val is not None:
        eval_batches = EvalBatches(source.val, data.seq_len, train.global_batch, train.eval_batches)
    return Job(config, source, target, make_engine(config, target, mesh), batches, eval_batches)


def make_engine(config: Config, target: Target, mesh: Mesh) -> Engine:
    """A config's model laid out on a mesh, and its training step. Needs no data, and a mesh may be one to compile for.

    Raises:
        UserError: the config, the model and the mesh do not fit together.
    """
    train = config.train
    return initialize(
        target.model,
        abstract_batch(train.global_batch, config.data.seq_len),
        mesh=mesh,
        rules=target.rules,
        optimizer=lambda layout: make_optimizer(
            config.optim,
            train.steps,
            param_shapes(layout),
            {path: leaf.num_stacked for path, leaf in layout.leaves.items()},
        ),
        stage=config.zero.stage,
        num_microbatches=train.microbatches,
        precision=make_precision(config),
        sequence_parallel=train.sequence_parallel,
        seed=config.run.seed,
    )


def make_precision(config: Config) -> Precision:
    """The number formats that a config names."""
    section = config.precision
    return Precision.make(section.compute, section.reduce, section.loss_scale, section.loss_scale_window)


def train(config: Config, progress: Progress | None = None) -> Result:
    """Trains to `train.steps` updates, from the run's newest checkpoint if it has one.

    SIGTERM and SIGINT end it after the update under way, with a checkpoint.

    Raises:
        UserError: something in the config, the data or the run directory is wrong; nothing was lost.
    """
    # First of all the signals: building and compiling may take minutes.
    with (
        stop_on_signal() as flag,
        start(config, flag) as world,
        contextlib.ExitStack() as stack,
        world.failures_told(),
        memory_advice(),
    ):
        return _train(config, world, stack, progress)


@contextlib.contextmanager
def memory_advice() -> Iterator[None]:
    """Says what can be done where the devices' memory does not suffice.

    Raises:
        TrainingError: it did not.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise TrainingError(
            f"out of memory: {str(error).splitlines()[0]}. Lower train.global_batch or raise train.microbatches, set "
            "train.remat=full, or raise zero.stage or mesh.model; `meshtrain plan` says what fits"
        ) from error


def _train(config: Config, world: World, stack: contextlib.ExitStack, progress: Progress | None) -> Result:
    """From the world's processes to the loop's end; what it opens is closed by `stack`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job = build(config)
    progress = progress or Progress(config.log.progress if world.is_main else "none", config.train.steps)
    stack.enter_context(show_logs(progress))
    run = stack.enter_context(open_run(config, owner=world.is_main))
    stack.enter_context(process_log(run.logs, world.place.process_id, progress, None if world.is_main else world.warn))
    world.listen(lambda text: progress.message(text, warning=True), at_exit=lambda: run.finish("failed"))
    checkpoints = stack.enter_context(Checkpointer(run.checkpoints, config.checkpoint.keep))
    for line in describe(job, run, world):
        progress.message(line)
    for text in sorted({*world.warnings, *(str(warning.message) for warning in caught)}):
        progress.message(text, warning=True)
    world.agree("data, checkpoint and step", same_everywhere(job, checkpoints, world))
    with world.limit("restore", config.launch.save):
        state = start_state(job, run, checkpoints, progress)
        first = int(state.step)
    run.record_config(config)
    if first >= config.train.steps:
        return dataclasses.replace(_finish(job, run, state, "already complete"), is_main=world.is_main)
    dumped = config.model_dump(mode="json")
    sinks = open_sinks(config.log, run.path, resume_step=first, enabled=world.is_main, config=dumped)
    stack.enter_context(sinks)
    progress.start(first)
    loop = Loop(job, run, checkpoints, sinks, stack.enter_context(progress), world)
    return dataclasses.replace(loop.run_from(state, first), is_main=world.is_main)


def same_everywhere(job: Job, checkpoints: Checkpointer, world: World) -> dict[str, JSON]:
    """What must be equal in all processes before the first collective, and could differ with equal configs."""
    facts: dict[str, JSON] = {"data": job.source.fingerprint, "newest checkpoint": checkpoints.latest()}
    if world.place.num_processes > 1:
        facts["lowered step"] = hashlib.sha256(job.engine.lower().as_text().encode()).hexdigest()
    return facts


def describe(job: Job, run: Run, world: World) -> Iterator[str]:
    """What is about to be trained, in a few lines."""
    config, layout = job.config, job.engine.layout
    sizes = " x ".join(f"{name}={size}" for name, size in layout.mesh.shape.items())
    device = jax.devices()[0].device_kind
    yield f"run      {show_path(run.path)}"
    if world.place.num_processes > 1:
        yield f"start    {world.describe()}"
    yield f"data     {job.source.description}; {job.batches.num_records:,} records of {config.data.seq_len} tokens"
    yield f"model    {config.model.target} '{config.model.preset}', {layout.num_params:,} parameters"
    yield f"layout   mesh {sizes} of {device} devices, ZeRO stage {layout.stage}, {config.precision.compute}"
    yield (
        f"batch    {config.train.global_batch} records = {job.batches.num_tokens_per_batch:,} tokens per update, "
        f"in {config.train.microbatches} microbatch{'es' * (config.train.microbatches > 1)}"
    )
    for line in run.changed:
        yield f"changed  {line}"


def start_state(job: Job, run: Run, checkpoints: Checkpointer, progress: Progress) -> TrainState:
    """The newest checkpoint's state, on this run's mesh and stage, or a new one.

    Raises:
        CheckpointError: the checkpoint was made of other data, or does not fit the model.
    """
    step = checkpoints.latest()
    if step is None:
        if run.resumed:
            seen = ", ".join(checkpoints.leftovers()) or "nothing"
            progress.message(f"no complete checkpoint in {run.checkpoints} ({seen}): starting at step 0", warning=True)
        return job.engine.init()
    fingerprint = checkpoints.meta(step).get("fingerprint")
    if fingerprint != job.source.fingerprint:
        raise CheckpointError(
            f"checkpoint {step} of {run.path} was trained on other data (fingerprint {str(fingerprint)[:12]}, now "
            f"{job.source.fingerprint[:12]}): choose another run.name"
        )
    newer = [name for name in checkpoints.leftovers() if _step_of(name) > step]
    if newer:
        progress.message(f"{', '.join(newer)} in {run.checkpoints} is not complete and is left out", warning=True)
    state: TrainState = checkpoints.restore(step, job.engine.abstract_state())
    progress.message(f"resumed  from step {step:,}")
    return state


def _step_of(name: str) -> int:
    """The step that a file below `checkpoints/` is named for, such as `20.incomplete-7`; -1 if none."""
    number = name.partition(".")[0]
    return int(number) if number.isdecimal() else -1


def evaluate(job: Job, state: TrainState) -> float:
    """Mean loss per token over the fixed validation set, in nats; NaN without one."""
    if job.eval_batches is None:
        return math.nan
    loss_sum = num_tokens = 0.0
    for index in range(job.eval_batches.num_batches):
        batch = to_global(job.eval_batches, index, job.engine.batch_sharding)
        sums = job.engine.evaluate(state, batch)
        loss_sum, num_tokens = loss_sum + float(sums[0]), num_tokens + float(sums[1])
    return loss_sum / num_tokens


@contextlib.contextmanager
def stop_on_signal() -> Iterator[StopFlag]:
    """While inside, SIGTERM and SIGINT set a flag, and nothing else. A second SIGINT interrupts at once."""
    flag = StopFlag()

    def handle(signum: int, frame: FrameType | None) -> None:
        if flag.signum and signum == signal.SIGINT:
            raise KeyboardInterrupt
        flag.signum = signum

    try:
        previous = {signum: signal.signal(signum, handle) for signum in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread, as in some notebooks: the signals are not ours to handle
        previous = {}
    try:
        yield flag
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


class Loop:
    """Steps, logs, evaluates and saves until the run is complete or a signal comes."""

    def __init__(
        self, job: Job, run: Run, checkpoints: Checkpointer, sinks: Sinks, progress: Progress, world: World
    ) -> None:
        self.job, self.run, self.checkpoints = job, run, checkpoints
        self.sinks, self.progress, self.world = sinks, progress, world
        self.config = job.config
        self.schedule = make_schedule(job.config.optim, job.config.train.steps)
        self.throughput = Throughput()
        self.flops_per_token = model_flops_per_token(job.engine.layout, job.target.sizes, job.config.data.seq_len)
        self.losses: list[float] = []  # since the last log line
        self.skipped = 0  # updates in a row
        self.last: dict[str, Any] = {}
        self.val_loss = math.nan

    def run_from(self, state: TrainState, first: int) -> Result:
        """Trains from update `first` on."""
        total = self.config.train.steps
        sharding = self.job.engine.batch_sharding
        in_flight: collections.deque[tuple[int, Any]] = collections.deque()
        step = first
        with prefetch(
            lambda index: to_global(self.job.batches, index, sharding), first, total, self.config.data.prefetch
        ) as batches:
            for index, batch in batches:
                if not self.world.may_step(index):
                    break
                with self._limit(index, first):
                    state, metrics = self.job.engine.step(state, batch)
                    step = index + 1
                    in_flight.append((step, metrics))
                    # One update runs while the next is queued: the device never waits, and a signal not for long.
                    while len(in_flight) > (0 if self._due(step) or index == first else 1):
                        self._read(*in_flight.popleft())
                self._after(step, state)
        while in_flight:
            self._read(*in_flight.popleft())
        if step > first:
            self._save_last(step, state)
        return self._end(state, step)

    def _limit(self, index: int, first: int) -> contextlib.AbstractContextManager[None]:
        limits = self.config.launch
        return (
            self.world.limit("compile", limits.compile)
            if index == first
            else self.world.limit(f"update {index + 1}", limits.update)
        )

    def _due(self, step: int) -> bool:
        train, every = self.config.train, self.config.checkpoint.every
        cadences = (train.log_every, train.eval_every, every)
        return step == train.steps or any(cadence and step % cadence == 0 for cadence in cadences)

    def _read(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Waits for an update and takes its figures."""
        values = {name: float(value) for name, value in metrics.items()}
        self.throughput.add(int(values["tokens"]))
        self.losses.append(values["loss"])
        self._count_skipped(step, values)
        log_every = self.config.train.log_every
        if step % log_every == 0 or step == self.config.train.steps:
            self._log(step, values)
        else:
            self.progress.update(step)

    def _count_skipped(self, step: int, values: dict[str, float]) -> None:
        """Says that an update was skipped, and stops a run that does nothing else.

        Raises:
            TrainingError: `train.max_skipped` in a row. A float16 loss scale that starts too high halves at each.
        """
        self.skipped = self.skipped + 1 if values["skipped"] else 0
        if not self.skipped:
            return
        what = f"the loss or a gradient was not finite (loss {values['loss']:.4f})"
        self.progress.message(f"update {step} skipped: {what}", warning=True)
        if self.skipped >= self.config.train.max_skipped:
            raise TrainingError(
                f"updates {step - self.skipped + 1} to {step} were all skipped: {what}; the weights are as they were "
                "before them. Lower optim.lr, set optim.clip_norm, or look at the data"
            )

    def _log(self, step: int, values: dict[str, float]) -> None:
        record: dict[str, Any] = values | {"lr": float(self.schedule(step - 1))}
        clip = self.config.optim.clip_norm
        record["clipped"] = clip is not None and values["grad_norm"] > clip
        lap = self.throughput.lap()
        if lap is not None:
            record |= lap._asdict()
            devices = self.job.engine.mesh.devices
            peak = peak_flops(devices.flat[0].device_kind, self.config.precision.compute)
            used = mfu(lap.tokens_per_s, self.flops_per_token, devices.size, peak)
            record |= {} if used is None else {"mfu": used}
        self.sinks.write(step, record)
        self.progress.update(step, record)
        count = len(self.losses)
        self.last = record | {"mean_loss": math.fsum(self.losses) / count, "num_averaged": count}
        self.losses.clear()
        self.run.update(step)

    def _after(self, step: int, state: TrainState) -> None:
        """Evaluation and checkpoints that are due after an update, but for the last ones."""
        if step == self.config.train.steps:
            return
        if self.config.train.eval_every and step % self.config.train.eval_every == 0:
            self._evaluate(step, state)
        if self.config.checkpoint.every and step % self.config.checkpoint.every == 0:
            self._save(step, state)

    def _evaluate(self, step: int, state: TrainState) -> None:
        with self.throughput.paused(), self.world.limit(f"evaluation at {step}", self.config.launch.compile):
            self.val_loss = evaluate(self.job, state)
        if not math.isnan(self.val_loss):
            self.sinks.write(step, {"val_loss": self.val_loss})
            self.progress.message(f"eval     step {step:,}: validation loss {self.val_loss:.4f}")

    def _save(self, step: int, state: TrainState) -> None:
        with self.throughput.paused(), self.world.limit(f"save of {step}", self.config.launch.save):
            meta: dict[str, JSON] = {
                "fingerprint": self.job.source.fingerprint,
                "config": self.config.model_dump(mode="json"),
                "mesh": dict(self.job.engine.mesh.shape),
            }
            self.checkpoints.save(step, state, meta)

    def _save_last(self, step: int, state: TrainState) -> None:
        """The checkpoint that the run ends with, on disk when this returns."""
        self._save(step, state)  # which does nothing where it has been saved
        with self.world.limit(f"save of {step}", self.config.launch.save):
            self.checkpoints.wait()
        self.progress.message(f"saved    {show_path(self.run.checkpoints / str(step))}")

    def _end(self, state: TrainState, step: int) -> Result:
        """The last evaluation if the run is complete, and how it ended."""
        complete = step >= self.config.train.steps
        if complete:
            self._evaluate(step, state)
        self.run.update(step)
        self.progress.close()
        tokens_per_s = self.last.get("tokens_per_s", math.nan)
        result = _finish(self.job, self.run, state, "complete" if complete else "stopped", self.val_loss)
        return dataclasses.replace(
            result,
            train_loss=self.last.get("mean_loss", math.nan),
            num_averaged=self.last.get("num_averaged", 0),
            tokens_per_s=tokens_per_s,
            signum=self.world.flag.signum if not complete else 0,
        )


def _finish(job: Job, run: Run, state: TrainState, outcome: Outcome, val_loss: float = math.nan) -> Result:
    """Records the run's end and sums it up."""
    if outcome == "already complete":
        val_loss = evaluate(job, state)
    run.finish("preempted" if outcome == "stopped" else "complete")
    tokens = job.source.tokens if job.source.val is None else job.source.val
    per_byte = job.source.bytes_per_token
    bits = None if per_byte is None or math.isnan(val_loss) else val_loss / math.log(2) / per_byte
    return Result(outcome, int(state.step), math.nan, val_loss, math.nan, unigram_entropy(tokens), bits, run.path)
