"""Start or resume a run: plan → folder → images → network → method → optimiser → loop."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from nearkin import ranks
from nearkin.console import Reporter, notebook_reporter
from nearkin.data.image_mark import image_mark
from nearkin.data.images import Dataset, Images
from nearkin.data.labelled_items import as_spec
from nearkin.data.pixels.stores import Store
from nearkin.data.pixels.views import augment, short_side_for
from nearkin.errors import NearkinError
from nearkin.files import Json, read_json
from nearkin.methods.catalogue import method
from nearkin.methods.cut_proxies import cut
from nearkin.networks.backbones import add_own_backbone, check_size
from nearkin.networks.embedder import Embedder
from nearkin.networks.fold_batch_norm import compile_kernels
from nearkin.networks.freed_memory import keep_freed_memory
from nearkin.networks.rank_batch_norm import batch_norms
from nearkin.space import Space
from nearkin.training.folds import train_folds
from nearkin.training.frozen import FrozenTrunk
from nearkin.training.images import Embedded, OpenImages, open_images, plan_dataset, training_images, with_storage
from nearkin.training.loop import Network, Training
from nearkin.training.model import Ensemble, Model, autocast, build_embedder, embedding_dim
from nearkin.training.optimiser import make_optimiser, parameter_groups, set_training
from nearkin.training.plan import Plan
from nearkin.training.random_streams import drawing_from, stream_seed
from nearkin.training.run_config import write_config
from nearkin.training.run_folder import RunFolder
from nearkin.training.run_opening import open_run, with_own_device
from nearkin.training.run_profile import Profile
from nearkin.training.settings import Settings, with_plan_keywords
from nearkin.training.settings_file import read_settings
from nearkin.training.start import keeps_head, start_record
from nearkin.training.step_graph import own_stream
from nearkin.training.test_view import choose_before_training
from nearkin.training.tracking import Log, Tracker


@with_plan_keywords
def train(
    *,
    out: str | Path | None = None,
    resume: bool = False,
    reporter: Reporter | None = None,
    after_test: Callable[[Embedded], object] | None = None,
    log: Log | None = None,
    strict: bool = False,
    config: str | Path | None = None,
    **settings: Unpack[Settings],
) -> RunFolder:
    """Train a model into a run folder and measure it on the test classes. Settings are the fields of `Plan`.

    `after_test` receives the test set as the final model embedded it; it is not called if the run was finished before,
    or if there are no test images. `log(values, step)` receives losses and scores during training, after a resume first
    the earlier ones. `strict` refuses images that cannot be used, which are otherwise left out and counted. `config` is
    a TOML file of settings, such as the settings.toml of a run; settings given here are preferred to those in it.
    `data` may also be a list of (image, label) or a torch Dataset of such, or a pair (train, test) of these, and
    `backbone` a module. `reporter` shows progress; by default there is some in notebooks only. Within
    `keep_images_open()` trainings on the same images read them once. In a process group, or started by torchrun, the
    processes train one model together; the first one calls `after_test` and `log`, shows progress and writes.
    """
    ranks.join()
    given = _own_parts({**settings}, resume=resume)
    if config is not None:
        if resume:
            raise NearkinError("A resumed run has its own settings: leave out config.")
        given = {**read_settings(config), **given}
    reporter = (reporter or notebook_reporter()) if ranks.is_first() else Reporter()
    reporter.strict = reporter.strict or strict
    with open_run(out, resume=resume, settings=given, reporter=reporter) as (run, plan, data):
        train_run(run, plan, data, resume=resume, reporter=reporter, after_test=after_test, log=log)
    return run


def _own_parts(settings: Mapping[str, Any], *, resume: bool) -> dict[str, Any]:
    """Replace objects among the settings by their names; a run that resumes knows them already."""
    given = dict(settings)
    if isinstance(net := given.get("backbone"), nn.Module):
        given["backbone"] = add_own_backbone(net, size=given.get("size") or 224)
        if resume:
            del given["backbone"]
    if "data" in given and not isinstance(given["data"], str):
        with ranks.first_on_machine():
            given["data"] = as_spec(given["data"])
    return given


def train_run(
    run: RunFolder,
    plan: Plan,
    data: Dataset | None,
    *,
    resume: bool,
    reporter: Reporter,
    after_test: Callable[[Embedded], object] | None = None,
    log: Log | None = None,
    expected: Json | None = None,
) -> None:
    """Train the model of a run, or the models of its folds, unless the run is finished. The caller holds its lock.

    The data set of the plan is loaded unless the caller has it already. `expected` are scores to record as those of
    another run.
    """
    if ranks.broadcast(run.result.exists()):
        return
    data = data or plan_dataset(plan)
    for sentence in data.notes:
        reporter.note(sentence)
    reporter.leave_out(data.left_out)
    plan = plan if resume else with_own_device(ranks.broadcast(with_storage(plan, data, reporter=reporter)))
    if plan.test_view == "auto" and not plan.needs_held_out:
        plan = choose_before_training(run, plan, data, train_model, reporter=reporter)
    train_one = partial(train_model, data=data, resume=resume, reporter=reporter, log=log, expected=expected)
    embedded = (
        train_folds(run, plan, train_one, reporter=reporter) if plan.folds and not plan.fold else train_one(run, plan)
    )
    if after_test is not None and embedded is not None and ranks.is_first():
        after_test(embedded)


def train_model(
    run: RunFolder,
    plan: Plan,
    *,
    data: Dataset,
    resume: bool,
    reporter: Reporter,
    log: Log | None = None,
    expected: Json | None = None,
) -> Embedded | None:
    """Train one model, with `resume` from its last checkpoint if there is one; return the test set as it embeds it.

    Without test images return None.
    """
    if plan.batch < ranks.size():
        raise NearkinError(f"A batch of {plan.batch} has too few images for {ranks.size()} processes: set batch.")
    training, head_scale = build_training(run, plan, data, reporter=reporter, log=log)
    training.batches()  # refuses impossible batches before anything is written
    known = read_json(run.config) if run.config.exists() else {}
    more = {"resolved": _resolved(training) | {"head_scale": head_scale, "own_streams": True}}
    more["resolved"]["images"] = image_mark(data)._asdict()
    if chosen := known.get("resolved", {}).get("test_view"):
        more["resolved"]["test_view"] = chosen
    more |= {"start": start_record(run, plan)} if plan.start else {}
    if expected := expected or known.get("expected"):
        more["expected"] = expected
    if resume and run.checkpoint.exists():
        more["resolved"] = known.get("resolved", {})  # how the model was built, perhaps by an older version
        training.restore()
    objective = training.method
    if ranks.is_first():
        write_config(run, plan, method=str(objective.spec), space=objective.ranked_in, **more)
    try:
        with own_stream(training.device) if plan.uses_graphs else contextlib.nullcontext():
            return training.train_to_end()
    finally:
        training.profile.report(reporter)
        del training.run_step  # it refers to the training, whose images and graphs would stay until they are collected


def _resolved(training: Training) -> Json:
    """The values that the plan's placeholders (0, -1, empty) stand for."""
    plan = training.plan
    return {
        "size": training.model.size,
        "test_size": training.model.test_size,
        "test_short_side": training.model.short_side,
        "images_per_class": training.method.images_per_class if plan.images_per_class < 0 else plan.images_per_class,
        "head_lr": plan.head_lr or plan.lr,
        "check_every": training.check_every,
        "steps_per_epoch": training.per_epoch,
        "training_images": len(training.train.images),
        "training_classes": training.train.images.classes,
    }


def build_training(
    run: RunFolder, plan: Plan, data: Dataset | None = None, *, reporter: Reporter, log: Log | None = None
) -> tuple[Training, float]:
    """Build all that the loop needs; return it with the factor by which the head was rescaled.

    The data set of the plan is loaded unless it is passed.
    """
    # Every training step has the same shapes; from a graph the search for the fastest algorithms does not pay.
    torch.backends.cudnn.benchmark = not plan.uses_graphs
    if plan.device == "cpu":
        keep_freed_memory()
    tracker = Tracker(plan, run.path / "tensorboard", log, on=ranks.is_first())
    profile = Profile(run, torch.device(plan.device), on=plan.profile and ranks.is_first())

    data = data or plan_dataset(plan)
    train_set, validation_set = training_images(plan, data)

    dim = embedding_dim(plan)
    with drawing_from(plan.model_seed, "method"):
        objective = method(plan.method, classes=train_set.classes, dim=dim, space=plan.space or None)
    if objective.needs_score and validation_set is None and plan.select != "test":
        raise NearkinError(f"{plan.method} needs the score of held-out classes: set select=validation.")
    initial = plan
    if run.checkpoint.exists() and plan.start and not RunFolder(plan.start).model.exists():
        initial = dataclasses.replace(plan, start="")  # the checkpoint has all that came from there
    embedder = _initial_network(initial, objective.space)
    seen_before = start_record(run, plan)["seen_before"] if plan.start else ()
    model = Model(embedder, plan, train_set.names, space=objective.ranked_in, seen_before=seen_before)
    if model.test_size != model.size:
        check_size(embedder.trunk, model.test_size)
    how: dict[str, Any] = {"size": model.size, "short_side": short_side_for(model.size)}
    view = augment(plan.augment, **how, normalise=embedder.trunk.normalise, compiled=plan.compile)

    train, validation, test = _open_all(model, (train_set, validation_set, data.test), profile, reporter)
    frozen = None
    if plan.frozen_views:
        with profile.part("embedding by the trunk"):
            frozen = FrozenTrunk(model, view, reporter=reporter)
            train = frozen.drawn(train)
            validation = validation and frozen.shown(validation)
            test = test and frozen.shown(test)
    head_scale = rescale_head(model, train.store, trained_in=_announce_start(embedder, initial, reporter))
    torch.manual_seed(stream_seed(plan.model_seed, "training"))
    objective.bind(embedder)
    ranks.broadcast_tensors([*embedder.state_dict().values(), *objective.state_dict().values()])
    if plan.cut_proxies:
        cut(objective)
    objective.to(model.device)
    objective.compiled = plan.compile
    training = Training(
        plan=plan,
        run=run,
        train=train,
        validation=validation,
        test=test,
        augment=view if frozen is None else frozen.draw,
        model=model,
        compiled=_compile(model, reporter) if plan.compile else embedder,
        method=objective,
        optimiser=make_optimiser(plan, parameter_groups(plan, embedder, objective)),
        tracker=tracker,
        profile=profile,
        reporter=reporter,
        frozen=frozen,
    )
    return training, head_scale


def _initial_network(plan: Plan, space: str) -> Embedder:
    """Build the network on the device of the plan, with weights that do not depend on the method."""
    with drawing_from(plan.model_seed, "network"), ranks.first_on_machine():
        embedder = build_embedder(plan, space)
    embedder.to(torch.device(plan.device), memory_format=torch.channels_last)  # type: ignore[call-overload]
    return embedder


def _open_all(
    model: Model, sets: tuple[Images, Images | None, Images], profile: Profile, reporter: Reporter
) -> tuple[OpenImages, OpenImages | None, OpenImages | None]:
    """Open training images, held-out ones if there are any, and test images unless all classes train."""
    train_set, validation_set, test_set = sets
    with _compiling_kernels(model, profile), profile.part("decoding"):
        train = open_images(model, train_set, "training", reporter=reporter)
        _check_classes(train_set, train.images)
        validation = None
        if validation_set is not None:
            validation = open_images(model, validation_set, "held-out", reporter=reporter)
        test = open_images(model, test_set, "test", reporter=reporter) if len(test_set) else None
    return train, validation, test


@contextmanager
def _compiling_kernels(model: Model, profile: Profile) -> Iterator[None]:
    """Compile the kernels of a network on a GPU while images are read; what fails here fails again in training."""
    if model.device.type != "cuda":
        yield
        return
    context = partial(autocast, model.device, model.plan.precision)
    with ThreadPoolExecutor(1) as background:
        compiled = background.submit(compile_kernels, model.embedder, model.device, context)
        yield
        with profile.part("compiling"):
            wait([compiled])


def _announce_start(embedder: Embedder, plan: Plan, reporter: Reporter) -> Space | None:
    """Say what a run starts from; return the space in which its head was trained, None for a new head."""
    if not plan.start:
        return None
    kept = keeps_head(embedder, plan.start)
    head = "" if kept else f", with a new head, because the embeddings have {embedder.dim} dimensions here"
    reporter.note(f"Starts from the network of {plan.start}{head}.")
    return Space(read_json(RunFolder(plan.start).config)["space"]) if kept else None


def _check_classes(wanted: Images, readable: Images) -> None:
    if lost := sorted(set(wanted.names) - set(readable.names)):
        raise NearkinError(f"No image of the training class {lost[0]!r} can be read: repair the class or remove it.")


@torch.no_grad()
def rescale_head(model: Model, store: Store, *, trained_in: Space | None = None) -> float:
    """Scale the head so that training images embed with the initial norm of the space; return the factor.

    Unnormalised embeddings of a pretrained network can have a norm above 100 and inner products in the thousands. A
    loss shrinks them fastest by silencing features, and the network is dead within an epoch. Starting from a norm of 1
    or 2, `lifted` learns little; so does `n_pair` from 11 if the network is trained from scratch. A head that was
    trained in the same space stays as it is.
    """
    embedder, plan = model.embedder, model.plan
    wanted = embedder.space.initial_norm
    if wanted is None or not plan.short_start or isinstance(embedder, Ensemble) or embedder.head.linear is None:
        return 1.0
    if trained_in is embedder.space:
        return 1.0
    rows = torch.linspace(0, len(store) - 1, min(plan.batch, len(store))).long()  # spread over all classes
    (_, pixels), *_ = store.read_batches(iter([rows]), read_ahead=0)
    trial = copy.deepcopy(embedder)  # in train mode its batch norms update their statistics
    set_training(trial, trial.trunk, plan, warming_up=False)
    norm = float(trial(model.view_of(store)(pixels)).norm(dim=1).mean())
    scale = wanted / norm if norm else 1.0
    for parameter in embedder.head.linear.parameters():  # the bias of a new head is 0
        parameter.mul_(scale)
    return scale


def _compile(model: Model, reporter: Reporter) -> Network:
    if ranks.size() > 1 and model.plan.batch_norm == "train" and batch_norms(model.embedder):
        reporter.note("The network is not compiled, because its batch norms take statistics over several processes.")
        return model.embedder
    # Without CUDA graphs a compiled network waits for the host to launch its kernels, not for the GPU.
    graphs = model.device.type == "cuda" and not model.plan.graph and ranks.size() == 1
    mode = "reduce-overhead" if graphs else "default"
    return torch.compile(model.embedder, mode=mode)
