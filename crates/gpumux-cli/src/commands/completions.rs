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
    let script = completed(args.shell, String::from_utf8(script)?);
    crate::output::print(&script)?;
    Ok(ExitCode::SUCCESS)
}

/// Completes the names of tenants, too, where a command takes them, and the program that another command starts.
fn completed(shell: Shell, script: String) -> String {
    match shell {
        Shell::Bash => {
            let own = BASH.replace("COMMANDS", &COMMANDS.join("|"));
            script + &own.replace("STARTERS", &STARTERS.join("|"))
        }
        Shell::Fish => {
            let own = FISH.replace("COMMANDS", &COMMANDS.join(" "));
            script + &own.replace("STARTERS", &STARTERS.join(" "))
        }
        Shell::Zsh => {
            let names = |line: &str| NAMES.iter().any(|it| line.contains(it));
            let lines = script.lines().map(|line| match names(line) {
                true => line.replace(":_default'", ":_gpumux_tenants'"),
                false => line.to_owned(),
            });
            let lines: Vec<String> = lines.collect();
            let own = ZSH.replace("STARTERS", &STARTERS.join("|"));
            // Its function must be there before the last line calls the first.
            let text = lines.join("\n") + "\n";
            text.replacen("_gpumux() {\n", &own, 1)
        }
        _ => script,
    }
}

/// Commands that take names of tenants.
const COMMANDS: [&str; 13] = [
    "stop", "kill", "wait", "logs", "ps", "events", "inspect", "set", "hint", "sleep", "wake",
    "move", "explain",
];
/// Commands that start the program behind `--`.
const STARTERS: [&str; 3] = ["run", "emu", "profile"];
/// What zsh's script has of an argument that names tenants.
const NAMES: [&str; 2] = ["::names -- ", ":name -- The tenant"];
const BASH: &str = r#"
_gpumux_with_tenants() {
    local at word="${COMP_WORDS[COMP_CWORD]}"
    if [[ "${COMP_WORDS[1]}" =~ ^(STARTERS)$ ]]; then
        for ((at = 2; at < COMP_CWORD; at++)); do
            [[ "${COMP_WORDS[at]}" == -- ]] || continue
            if declare -F _command_offset >/dev/null; then
                _command_offset $((at + 1))
            elif ((at + 1 == COMP_CWORD)); then
                COMPREPLY=($(compgen -c -- "$word"))
            else
                COMPREPLY=()
            fi
            return
        done
    fi
    _gpumux "$@"
    if [[ "$word" != -* && "${COMP_WORDS[1]}" =~ ^(COMMANDS)$ && $COMP_CWORD -gt 1 ]]; then
        COMPREPLY=($(compgen -W "$(gpumux ps -q 2>/dev/null)" -- "$word"))
    fi
}
complete -F _gpumux_with_tenants -o nosort -o bashdefault -o default gpumux 2>/dev/null ||
    complete -F _gpumux_with_tenants -o bashdefault -o default gpumux
"#;
const FISH: &str = r#"
function __gpumux_started
    set -l words (commandline -opc)
    set -l at (contains -i -- -- $words)
    set -l behind (string escape -- $words[(math $at + 1)..-1]) (commandline -ct)
    complete -C (string join ' ' -- $behind)
end
complete -c gpumux -n "__fish_seen_subcommand_from STARTERS; and contains -- -- (commandline -opc)" -x -a "(__gpumux_started)"
complete -c gpumux -n "__fish_seen_subcommand_from COMMANDS" -f -a "(gpumux ps -q 2>/dev/null)"
"#;
/// Ends in the first line of the script's function.
const ZSH: &str = r#"_gpumux_tenants() {
    local -a tenants
    tenants=(${(f)"$(gpumux ps -q 2>/dev/null)"})
    compadd -a tenants
}

_gpumux() {
    local -i gpumux_behind=${words[(ie)--]}
    if [[ $words[2] == (STARTERS) ]] && (( gpumux_behind < CURRENT )); then
        words=("${(@)words[gpumux_behind + 1,-1]}")
        (( CURRENT -= gpumux_behind ))
        _normal
        return
    fi
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
        completed(shell, String::from_utf8(script).unwrap())
    }

    #[test]
    fn commands_that_take_tenants_complete_their_names() {
        let zsh = script(Shell::Zsh);
        let places = zsh.matches(":_gpumux_tenants'").count();
        assert_eq!(places, COMMANDS.len(), "{zsh}");
        assert!(zsh.find("_gpumux_tenants() {") < zsh.find("_gpumux() {"));
        let command = crate::Cli::command();
        let known: Vec<&str> = command.get_subcommands().map(|it| it.get_name()).collect();
        assert!(COMMANDS.iter().all(|name| known.contains(name)));
        assert!(STARTERS.iter().all(|name| known.contains(name)));
        assert!(zsh.contains("== (run|emu|profile) ]]"), "{zsh}");
        assert!(script(Shell::Bash).contains("^(stop|kill|"));
        assert!(script(Shell::Fish).contains("seen_subcommand_from stop kill "));
    }
}
