"""The commands of `corral`: names, modules and summaries, and the text of `corral --help`. Only data.

`corral --help` needs nothing else, so it is printed at once. A test compares the summaries with the commands.
"""

from __future__ import annotations

# Each command: its module with the application in it (or a function that returns the application), and its summary.
COMMANDS = {
    "up": ("corral.cli.up.command:app", "Run a fleet on this machine."),
    "join": ("corral.cli.nodes.join:app", "Join this machine to a fleet and run a worker."),
    "nodes": ("corral.cli.nodes.commands:app", "List, approve, drain, label and delete nodes."),
    "token": ("corral.cli.nodes.tokens:app", "Create, list and revoke join tokens."),
    "keys": ("corral.cli.fleet.keys:app", "Create, list and revoke API keys."),
    "backends": ("corral.cli.backends.commands:app", "Install, upgrade, verify and delete backends."),
    "models": ("corral.cli.models.commands:app", "Install, edit, scale and delete the models of the fleet."),
    "bundle": (
        "corral.cli.bundle.commands:app",
        "Take backends and models to a fleet without internet access, in one file.",
    ),
    "apply": ("corral.cli.fleet.fleet_file:apply_app", "Apply a file with labels, backends, models and schedules."),
    "export": ("corral.cli.fleet.fleet_file:export_app", "Print the fleet as a YAML file for `corral apply`."),
    "run": (
        "corral.cli.models.short_commands:run_app",
        "Talk to a model, like `ollama run`; `corral chat` has more options.",
    ),
    "ps": ("corral.cli.models.short_commands:ps_app", "List the loaded models and where they run, like `ollama ps`."),
    "pull": ("corral.cli.models.short_commands:pull_app", "Install a model and fetch its files, like `ollama pull`."),
    "chat": ("corral.cli.models.chat:app", "Send a prompt to a model and print the answer."),
    "logs": (
        "corral.cli.fleet.logs:app",
        "Print the log of the processes of a model or a backend, or of a node's worker.",
    ),
    "why": ("corral.cli.fleet.why:app", "Explain placement decisions, operations and rollouts."),
    "ops": ("corral.cli.operations.commands:app", "List, follow, cancel and retry operations."),
    "top": ("corral.cli.top.command:app", "Show nodes, models, operations, requests and logs live in the terminal."),
    "rollouts": (
        "corral.cli.operations.rollouts:app",
        "Show, pause, promote and abort rollouts.",
    ),
    "requests": ("corral.cli.fleet.requests:app", "List inference requests and their results, newest first."),
    "fleet": ("corral.cli.fleet.versions:app", "Show and upgrade the version of Corral on each machine."),
    "contexts": ("corral.cli.fleet.contexts:app", "List the fleets of this machine, and choose one."),
    "doctor": ("corral.cli.doctor.command:app", "Find problems and show how to fix them."),
    "support-bundle": (
        "corral.cli.backup.support_bundle:app",
        "Write logs, settings and checks into an archive, without secrets.",
    ),
    "controller": (
        "corral.cli.nodes.role_commands:controller_app",
        "Run a controller: scheduler, admin API and web page.",
    ),
    "gateway": ("corral.cli.nodes.role_commands:gateway_app", "Run a gateway: the public port of the fleet."),
    "worker": ("corral.cli.nodes.role_commands:worker_app", "Run a worker on this machine."),
    "bus": (
        "corral.cli.nodes.bus_server:bus_app",
        "Run the bus of a fleet by itself: NATS with the accounts of the fleet.",
    ),
    "secrets": (
        "corral.cli.fleet.secrets:app",
        "Create keys and certificates for a fleet whose roles run apart from each other.",
    ),
    "service": ("corral.cli.service.command:app", "Run Corral as a service, from the start of the machine on."),
    "backup": ("corral.cli.backup.commands:backup_app", "Write the state of a fleet of this machine into one file."),
    "restore": ("corral.cli.backup.commands:restore_app", "Restore a fleet from a backup."),
    "migrate-store": ("corral.cli.fleet.migrate_store:app", "Copy the database of a stopped fleet to PostgreSQL."),
    "completion": ("corral.cli.completion:app", "Print the script with which a shell completes commands and names."),
    "version": ("corral.cli.version:app", "Print the version of Corral, of its protocol and of Python."),
}
# Commands that start something or read only this machine: `corral --context NAME` before them would have no effect.
WITHOUT_CONTEXT = (
    "up",
    "join",
    "contexts",
    "controller",
    "gateway",
    "worker",
    "bus",
    "secrets",
    "service",
    "restore",
    "migrate-store",
    "completion",
    "version",
)

CONTEXT_HELP = "name of a fleet on this machine, from `corral contexts list` (CORRAL_CONTEXT)"

_INTRODUCTION = """Usage: corral [OPTIONS] COMMAND [ARGS]...

  One OpenAI-compatible endpoint over every machine you own.

    corral                           show the state of the fleet and the next useful command
    corral up                        start a fleet on this machine, for this machine only
    corral up --lan                  start a fleet that other machines can join
    corral token create              print the command with which another machine joins
    corral nodes list                list the machines of the fleet
    corral backends install NAME     install an inference engine on every node
    corral models install NAME       install a model; `corral models available` lists them
    corral chat NAME "Hello"         send a prompt to a model
    corral top                       show the fleet live in the terminal
    corral ops list                  list the operations that have not ended
    corral why model NAME            show where the scheduler would place a model, and why
    corral doctor                    find problems and show how to fix them

Options:
  --context NAME  name of a fleet on this machine, from `corral contexts list`
                  (CORRAL_CONTEXT); every command that connects takes it too
  -q, --quiet     print results and errors only, no notes and no progress
  --version       print the version and exit
  -h, --help      Show this message and exit.

Commands:
"""


def help_text() -> str:
    """What `corral --help` prints."""
    width = max(map(len, COMMANDS))
    return _INTRODUCTION + "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items())
