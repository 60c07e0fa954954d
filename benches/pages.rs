//! Checks the pages of the repository: every relative link has a target, no page is too long, and the
//! table of proven devices matches the reports.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};
use rmsnorm_core::conformance::read_report;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The Markdown files below a folder, without the folders of tools and builds.
fn pages(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && !name.starts_with('.') && !name.starts_with("target") && name != "dist" {
            found.extend(pages(&path));
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
    found
}

/// The anchor that renderers make of a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.to_lowercase().replace(' ', "-");
    kept.chars().filter(|letter| letter.is_alphanumeric() || "-_".contains(*letter)).collect()
}

/// The targets of links and the anchors of headings.
fn links_and_anchors(text: &str) -> (Vec<String>, HashSet<String>) {
    let (mut links, mut anchors, mut heading) = (Vec::new(), HashSet::new(), None);
    for event in Parser::new_ext(text, Options::ENABLE_TABLES) {
        if let Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) = event {
            links.push(dest_url.into_string());
        } else if let Event::Start(Tag::Heading { .. }) = event {
            heading = Some(String::new());
        } else if let Event::End(TagEnd::Heading(_)) = event {
            anchors.extend(heading.take().map(|heading| anchor(&heading)));
        } else if let (Event::Text(text) | Event::Code(text), Some(heading)) = (event, &mut heading) {
            heading.push_str(&text);
        }
    }
    (links, anchors)
}

#[test]
fn relative_links_lead_to_files_and_headings() {
    let mut broken = Vec::new();
    for page in pages(&root()) {
        let (links, _) = links_and_anchors(&fs::read_to_string(&page).unwrap());
        // A package's pages may link to its items.
        for link in
            links.iter().filter(|link| !link.contains("://") && !link.contains("::") && !link.starts_with("crate"))
        {
            let (path, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = if path.is_empty() { page.clone() } else { page.parent().unwrap().join(path) };
            let is_there = match fs::read_to_string(&target) {
                Ok(text) if !heading.is_empty() => links_and_anchors(&text).1.contains(heading),
                _ => target.exists(),
            };
            if !is_there {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

/// Each report is as the suite wrote it, and has its row.
#[test]
fn proven_devices_are_those_of_the_reports() {
    let folder = root().join("docs/reports");
    let page = fs::read_to_string(folder.join("README.md")).unwrap();
    let told = page.lines().filter(|line| line.starts_with("| ["));
    let mut rows = Vec::new();
    for entry in fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "json") {
            let (file, text) =
                (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read_to_string(&path).unwrap());
            let report = read_report(&text).unwrap_or_else(|reason| panic!("{file} is refused: {reason}"));
            rows.push(format!("| [{}]({file}) | {report} |", file.trim_end_matches(".json")));
        }
    }
    rows.sort();
    assert_eq!(told.collect::<Vec<_>>(), rows, "the table of docs/reports/README.md, and the reports beside it");
}

#[test]
fn pages_are_short() {
    let results = root().join("benches/results");
    for page in pages(&root()) {
        let most = match page.strip_prefix(root()).unwrap().to_str().unwrap() {
            "README.md" => 130,
            "ARCHITECTURE.md" => 150,
            "rmsnorm-spec/math.md" => continue,
            _ if page.starts_with(&results) => continue,
            _ => 250,
        };
        let lines = fs::read_to_string(&page).unwrap().lines().count();
        assert!(lines <= most, "{} has {lines} lines, at most {most}", page.display());
    }
}
