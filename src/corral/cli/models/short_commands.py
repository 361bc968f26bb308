"""`corral run`, `corral ps` and `corral pull`: names that people know from Ollama."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from corral.cli.common import declare
from corral.cli.common.fleet_command import fleet_command
from corral.cli.common.options import Detach, Json
from corral.cli.models.install import install_all
from corral.cli.models.replicas import Model, print_replicas
from corral.cli.models.sources import SourceOptions

if TYPE_CHECKING:
    from corral.client import Client

_HUBS = ("hf.co/", "huggingface.co/")

run_app = declare.App()
ps_app = declare.App()
pull_app = declare.App()


@run_app.command("run")
@fleet_command
async def run_model(
    client: Client,
    model: Model,
    prompt: Annotated[
        str, declare.Argument(metavar="PROMPT", help="the prompt; - reads stdin; without a prompt, a conversation")
    ] = "",
) -> int:
    """Talk to a model, like `ollama run`; `corral chat` has more options.

    \b
    Examples:
      corral run smollm2-135m
      corral run smollm2-135m "What is a corral?"
    """
    from corral.cli.models.chat import send  # here: `corral ps` needs no terminal for conversations

    return await send(client, model, prompt)


@ps_app.command("ps")
@fleet_command
async def list_running(client: Client, as_json: Json = False) -> None:
    """List the loaded models and where they run, like `ollama ps`.

    The same as `corral models replicas`.

    \b
    Examples:
      corral ps
    """
    await print_replicas(client, as_json=as_json)


@pull_app.command("pull")
@fleet_command
async def pull_model(client: Client, model: Model, detach: Detach = False, as_json: Json = False) -> int:
    """Install a model and fetch its files, like `ollama pull`.

    `corral models install` has more options; `corral models available` lists the names.

    \b
    Examples:
      corral pull smollm2-135m
      corral pull hf.co/bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M
    """
    from corral.contract.catalogue import InstallModel

    request = InstallModel(model=hub_source(model), fetch=True)
    return await install_all(client, [request], SourceOptions(quiet=as_json), detach=detach, as_json=as_json)


def hub_source(name: str) -> str:
    """Ollama's spelling of a repository of the hub in ours. Pure."""
    for hub in _HUBS:
        if name.startswith(hub):
            return f"hf://{name.removeprefix(hub)}"
    return name
