"""`corral models install`: from galleries, from sources anywhere, from files of this machine, and by definitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from corral.cli.common import declare
from corral.cli.common.fleet_command import destructive_if_given
from corral.cli.common.options import Detach, Json, MaxErrors, MaxSlowdown, MinRequests, reject_empty, soak_fields
from corral.cli.common.output import DONE, print_json, print_note
from corral.cli.models.options import File, Recreate, Set, Soak, change_each, changes_of, print_change, read_documents
from corral.cli.models.sources import (
    SourceOptions,
    check_source_options,
    is_source,
    plan_source,
    prepare_install,
    print_plans,
)
from corral.cli.operations import watch

if TYPE_CHECKING:
    from corral.client import Client
    from corral.contract.catalogue import InstallModel, ModelChanged

MaybeModels = Annotated[
    list[str] | None,
    declare.Argument(
        metavar="MODEL",
        help="names in a gallery, GALLERY@NAME, hf://OWNER/REPO[:QUANT], hf://OWNER/REPO/FILE.gguf, the same with "
        "modelscope://, https://…/FILE.gguf, or a GGUF file of this machine",
    ),
]


@destructive_if_given("replace")
async def install_models(
    client: Client,
    names: MaybeModels = None,
    file: File = "",
    own_name: Annotated[
        str,
        declare.Option("--as", "--name", metavar="NAME", help="name of the model in this fleet", callback=reject_empty),
    ] = "",
    quant: Annotated[
        str,
        declare.Option(
            "--quant", metavar="QUANT", help="this quantisation of a repository instead of the best that fits"
        ),
    ] = "",
    mmproj: Annotated[
        str, declare.Option("--mmproj", metavar="FILE", help="projector of a vision model, with a GGUF file")
    ] = "",
    variant: Annotated[
        str,
        declare.Option(
            "--variant", metavar="NAME", help="install this variant instead of the one that fits the fleet best"
        ),
    ] = "",
    sets: Set = None,
    replace: Annotated[bool, declare.Option("--replace", help="replace an installed model of the same name")] = False,
    recreate: Recreate = False,
    soak: Soak = "",
    max_errors: MaxErrors = "",
    max_slowdown: MaxSlowdown = None,
    min_requests: MinRequests = None,
    no_fetch: Annotated[
        bool, declare.Option("--no-fetch", help="fetch the files on the first request instead of now")
    ] = False,
    dry_run: Annotated[
        bool, declare.Option("--dry-run", help="show the definition and where it fits; change nothing")
    ] = False,
    detach: Detach = False,
    as_json: Json = False,
) -> int:
    """Install models and fetch their files to the controller.

    They come from a gallery, from the Hugging Face hub, from ModelScope, from a URL, from a GGUF file of this machine
    (which is uploaded), or from a definition in --file. Of a repository, the best quantisation that fits on a node is
    chosen. The definition (backend, context size, chat template, embeddings) is derived from the file; --set changes
    it.

    With --replace --soak the new revision of a model is tried on a share of the requests first, as with
    `corral models edit --soak`.

    Ctrl-C detaches; the controller continues to fetch. An upload stops: run the command again to continue it. Exit
    code 0: done. 1: failed. 3: not finished yet.

    \b
    Examples:
      corral models install smollm2-135m
      corral models install smollm2-135m --detach
      corral models install smollm2-135m --as tiny --set context_size=2048
      corral models install hf://bartowski/Llama-3.2-3B-Instruct-GGUF --dry-run
      corral models install hf://bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M --as llama
      corral models install modelscope://Qwen/Qwen3-4B-GGUF
      corral models install ./my-model.gguf
      corral models install --file mine.yaml --replace
    """
    from corral.contract.catalogue import InstallModel

    if bool(names) == bool(file):
        raise declare.BadParameter("give either names of models or --file")
    texts = read_documents(file) if file else []
    if own_name and len(names or texts) != 1:
        raise declare.BadParameter("--as needs exactly one model")
    options = SourceOptions(quant, own_name, mmproj, changes_of(sets, None), quiet=as_json)
    check_source_options(names or (), options)
    if dry_run:
        return await _dry_run(client, names or (), texts, options, variant, as_json=as_json)
    more: dict[str, Any] = {"name": own_name, "overrides": dict(options.overrides), "replace": replace}
    more |= soak_fields(soak=soak, max_errors=max_errors, max_slowdown=max_slowdown, min_requests=min_requests)
    more["fetch"] = not no_fetch
    if soak and not replace:
        raise declare.BadParameter("--soak compares a new revision with the one that is installed: add --replace")
    requests = [InstallModel(model=name, variant=variant, recreate=recreate, **more) for name in names or ()]
    requests += [InstallModel(text=text, recreate=recreate, **more) for text in texts]
    return await install_all(client, requests, options, detach=detach, as_json=as_json)


async def _dry_run(
    client: Client, names: Sequence[str], texts: Sequence[str], options: SourceOptions, variant: str, *, as_json: bool
) -> int:
    from corral.contract.installs import InstallPlan

    if texts:
        raise declare.BadParameter("--dry-run is for models by name or source: --file shows its definition itself")
    plans = []
    for name in names:
        if is_source(name):
            plans.append((await plan_source(client, name, options)).plan)
        elif options.name or options.overrides or variant:
            raise declare.BadParameter(
                f"--dry-run shows {name} as the gallery has it: leave --as, --set and --variant out"
            )
        else:
            entry = await client.models.get_available(name)
            plans.append(InstallPlan(entry.id, entry.definition, text=f"{entry.id} of the gallery {entry.gallery}"))
    print_plans(plans, as_json=as_json)
    return DONE


async def finish_change(client: Client, changed: ModelChanged, *, detach: bool, as_json: bool) -> int:
    """Print what an edit did, and follow its trial."""
    trials = [changed.rollout_id] if changed.rollout_id else []
    if as_json:
        code = await watch.wait_silently(client, trials) if trials and not detach else DONE
        print_json(changed)
        return code
    print_change(changed)
    return await watch.follow_or_detach(client, trials, detach=detach, as_json=False) if trials else DONE


async def install_all(
    client: Client, requests: Sequence[InstallModel], options: SourceOptions, *, detach: bool, as_json: bool
) -> int:
    """Install one after the other. A failure does not stop the rest."""

    async def install(request: InstallModel) -> ModelChanged:
        if is_source(request.model):
            planned = await plan_source(client, request.model, options)
            request = await prepare_install(client, planned, request, options)
        return await client.models.install(request)

    done, code = await change_each(requests, install, as_json=as_json)
    fetching = [job for each in done for job in (each.job_id, each.rollout_id) if job]
    if as_json:  # the result has the ids of the operations
        fetched = await watch.wait_silently(client, fetching) if fetching and not detach else DONE
        print_json(done)
        return code or fetched
    fetched = await watch.follow_or_detach(client, fetching, detach=detach, as_json=False) if fetching else DONE
    if any(each.changed for each in done):
        print_note("The first request loads the model. Keep replicas ready: `corral models scale NAME --min 1`")
    return code or fetched
