"""`dss completion`: prints click's completion script for a shell."""

import click

NAME = "dss"
VARIABLE = "_DSS_COMPLETE"  # set by the script when it asks `dss` for completions


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes dss in your shell.

    \b
      bash  eval "$(dss completion bash)"        in ~/.bashrc
      zsh   eval "$(dss completion zsh)"         in ~/.zshrc, after compinit
      fish  dss completion fish | source         in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None  # noqa: S101
    click.echo(found(ctx.find_root().command, {}, NAME, VARIABLE).source(), nl=False)
