//! docs/cli.md has exactly the commands and options of the program.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::support::Folder;

/// The long options in a text: two hyphens and a name that begins with a letter.
fn options(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'));
    let is_option = |word: &&str| word.strip_prefix("--").is_some_and(|name| name.starts_with(char::is_alphabetic));
    words.filter(is_option).map(str::to_owned).collect()
}

/// The options that a help text lists. Each begins a line, after its short form if it has one.
fn listed(help: &str) -> BTreeSet<String> {
    let entries = help.lines().filter(|line| line.trim_start().starts_with('-'));
    let names = entries.filter_map(|line| line.split_whitespace().find(|word| word.starts_with("--")));
    names.filter(|name| *name != "--help").map(str::to_owned).collect()
}

/// The section of the page below `## \`TITLE\``.
fn section<'a>(page: &'a str, title: &str) -> &'a str {
    let heading = format!("\n## `{title}`\n");
    let (_, rest) = page.split_once(&heading).unwrap_or_else(|| panic!("docs/cli.md has no section {title:?}"));
    rest.split("\n## ").next().unwrap_or(rest)
}

#[test]
fn page_has_every_command_and_option_and_no_other() {
    // A packaged crate does not have the docs folder.
    let pages = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs"));
    if !pages.is_dir() {
        return;
    }
    let page = fs::read_to_string(pages.join("cli.md")).unwrap();
    let folder = Folder::new();
    let help = |args: &[&str]| folder.rmsnorm(args).stdout;
    let overview = help(&["--help"]);
    let (_, commands) = overview.split_once("Commands:\n").unwrap();
    let commands = commands.lines().take_while(|line| !line.is_empty());
    let commands: Vec<&str> =
        commands.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help").collect();
    assert!(commands.len() >= 7, "{commands:?}");

    let mut known = BTreeSet::from(["--help".to_owned(), "--version".to_owned()]);
    let mut titles = BTreeSet::from(["rmsnorm".to_owned()]);
    for command in commands {
        let (title, has) = (format!("rmsnorm {command}"), listed(&help(&[command, "--help"])));
        assert!(!has.is_empty(), "{title}");
        let rows = section(&page, &title).lines().filter(|line| line.starts_with("| `-"));
        let told: BTreeSet<String> = rows.flat_map(|line| options(line.split(" | ").next().unwrap_or(line))).collect();
        assert_eq!(told, has, "the table of {title:?} in docs/cli.md, and --help");
        known.extend(has);
        titles.insert(title);
    }
    let unknown: Vec<String> = options(&page).difference(&known).cloned().collect();
    assert!(unknown.is_empty(), "docs/cli.md names {unknown:?}, which no command has");
    let headings = page.lines().filter_map(|line| line.strip_prefix("## ")).map(|title| title.replace('`', ""));
    assert_eq!(headings.collect::<BTreeSet<_>>(), titles, "the sections of docs/cli.md, and the commands");
}
