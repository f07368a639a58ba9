//! `gpumux completions`: what a shell needs to complete our commands.

use std::process::ExitCode;

use clap_complete::Shell;

const EXAMPLES: &str = "\
Examples:
  gpumux completions bash > ~/.local/share/bash-completion/completions/gpumux
  gpumux completions zsh > ~/.zfunc/_gpumux
  gpumux completions fish > ~/.config/fish/completions/gpumux.fish";

/// Print the completions for a shell
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Which shell
    shell: Shell,
}

pub(crate) fn run(args: &Args, command: &mut clap::Command) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, command, "gpumux", &mut script);
    let script = with_tenants(args.shell, String::from_utf8(script)?);
    crate::output::print(&script)?;
    Ok(ExitCode::SUCCESS)
}

/// Completes the names of tenants, too, where a command takes them.
fn with_tenants(shell: Shell, script: String) -> String {
    match shell {
        Shell::Bash => script + &BASH.replace("COMMANDS", &COMMANDS.join("|")),
        Shell::Fish => script + &FISH.replace("COMMANDS", &COMMANDS.join(" ")),
        Shell::Zsh => {
            let lines = script.lines().map(|line| match line.contains(NAMED_BY_PS) {
                true => line.replace(":_default'", ":_gpumux_tenants'"),
                false => line.to_owned(),
            });
            let lines: Vec<String> = lines.collect();
            // Its function must be there before the last line calls the first.
            let text = lines.join("\n") + "\n";
            text.replacen("_gpumux() {", &(ZSH.to_owned() + "_gpumux() {"), 1)
        }
        _ => script,
    }
}

/// Commands that take names of tenants.
const COMMANDS: [&str; 12] = [
    "stop", "kill", "wait", "logs", "ps", "events", "inspect", "set", "hint", "sleep", "wake",
    "explain",
];
/// What the help of such an argument says.
const NAMED_BY_PS: &str = "as `gpumux ps";
const BASH: &str = r#"
_gpumux_with_tenants() {
    _gpumux "$@"
    local word="${COMP_WORDS[COMP_CWORD]}"
    if [[ "$word" != -* && "${COMP_WORDS[1]}" =~ ^(COMMANDS)$ && $COMP_CWORD -gt 1 ]]; then
        COMPREPLY=($(compgen -W "$(gpumux ps -q 2>/dev/null)" -- "$word"))
    fi
}
complete -F _gpumux_with_tenants -o nosort -o bashdefault -o default gpumux 2>/dev/null ||
    complete -F _gpumux_with_tenants -o bashdefault -o default gpumux
"#;
const FISH: &str = r#"
complete -c gpumux -n "__fish_seen_subcommand_from COMMANDS" -f -a "(gpumux ps -q 2>/dev/null)"
"#;
const ZSH: &str = r#"_gpumux_tenants() {
    local -a tenants
    tenants=(${(f)"$(gpumux ps -q 2>/dev/null)"})
    compadd -a tenants
}

"#;

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    /// Commands whose names the tests need, as the program has them.
    fn script(shell: Shell) -> String {
        let mut script = Vec::new();
        let mut command = crate::Cli::command();
        clap_complete::generate(shell, &mut command, "gpumux", &mut script);
        with_tenants(shell, String::from_utf8(script).unwrap())
    }

    #[test]
    fn commands_that_take_tenants_complete_their_names() {
        let zsh = script(Shell::Zsh);
        let places = zsh.matches(":_gpumux_tenants'").count();
        assert!(places >= 10, "{places}");
        assert!(zsh.find("_gpumux_tenants() {") < zsh.find("_gpumux() {"));
        let command = crate::Cli::command();
        let known: Vec<&str> = command.get_subcommands().map(|it| it.get_name()).collect();
        assert!(COMMANDS.iter().all(|name| known.contains(name)));
        assert!(script(Shell::Bash).contains("^(stop|kill|"));
        assert!(script(Shell::Fish).contains("seen_subcommand_from stop kill "));
    }
}
