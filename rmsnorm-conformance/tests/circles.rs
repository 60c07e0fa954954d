//! The modules of a package form no circle: no file needs, through others, a file that needs it.
//!
//! The test reads every path that starts with `crate::` or `super::`, and every path to a module's
//! own submodules. A re-export counts as the module that declares the item. Code for tests is left
//! out. One kind of circle is allowed: a module and its own submodules, because they share types.
#![expect(clippy::expect_used, reason = "a test fails by panicking, in its helper functions too")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// The source text of each module, by its path: `["judge", "bounds"]`. The crate's root is `[]`.
type Sources = BTreeMap<Vec<String>, String>;

type Module = Vec<String>;

fn read(folder: &Path, module: &Module, sources: &mut Sources) {
    for entry in fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("a file").path();
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let inner: Module = module.iter().cloned().chain([name.clone()]).collect();
        if path.is_dir() {
            read(&path, &inner, sources);
        } else {
            let inner = match name.as_str() {
                "lib" => Vec::new(),
                "mod" => module.clone(),
                _ => inner,
            };
            sources.insert(inner, product(&fs::read_to_string(&path).expect("a text")));
        }
    }
}

/// The text without comments and without what is compiled for tests only.
fn product(text: &str) -> String {
    let mut kept = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if line.trim() == "#[cfg(test)]" {
            let item = lines.next().unwrap_or_default();
            let end = format!("{}}}", &item[..item.len() - item.trim_start().len()]);
            if item.ends_with('{') {
                lines.by_ref().find(|line| *line == end);
            }
        } else if !line.trim_start().starts_with("//") {
            kept.push_str(line);
            kept.push('\n');
        }
    }
    kept
}

/// Every path in a text, with the lists of a `use` written out: `a::{b, c::d}` is `a::b` and
/// `a::c::d`.
fn paths(text: &str) -> BTreeSet<Vec<String>> {
    let mut found = BTreeSet::new();
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let mut rest = text;
    while let Some(start) = rest.find(is_name) {
        rest = &rest[start..];
        rest = read_path(rest, &[], &mut found);
    }
    found
}

/// Reads the path at the start of `text`, below `outer`, and returns the text after it.
fn read_path<'t>(text: &'t str, outer: &[String], found: &mut BTreeSet<Vec<String>>) -> &'t str {
    let mut path = outer.to_vec();
    let mut rest = text;
    loop {
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        path.push(rest[..end].to_owned());
        rest = &rest[end..];
        let Some(inner) = rest.strip_prefix("::") else { break };
        let Some(list) = inner.strip_prefix('{') else {
            rest = inner;
            if !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_') {
                break;
            }
            continue;
        };
        rest = list;
        loop {
            rest = rest.trim_start_matches(|c: char| c.is_whitespace() || c == ',');
            if let Some(after) = rest.strip_prefix('}') {
                return after;
            }
            if !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_') {
                return rest;
            }
            rest = read_path(rest, &path, found);
        }
    }
    found.insert(path);
    rest
}

/// The module that a path in `module` leads to, if it leads to one of this crate.
fn target(sources: &Sources, module: &Module, path: &[String]) -> Option<Module> {
    // A single name is a variable, a keyword or the scope of a `pub`.
    let (mut at, mut rest): (Module, &[String]) =
        match path.split_first().filter(|(_, rest)| !rest.is_empty())?.0.as_str() {
            "crate" => (Vec::new(), &path[1..]),
            "self" => (module.clone(), &path[1..]),
            "super" => (module[..module.len().checked_sub(1)?].to_vec(), &path[1..]),
            name => {
                let child: Module = module.iter().cloned().chain([name.to_owned()]).collect();
                (sources.contains_key(&child).then_some(child)?, &path[1..])
            }
        };
    while let Some(name) = rest.first() {
        let child: Module = at.iter().cloned().chain([name.clone()]).collect();
        if sources.contains_key(&child) {
            (at, rest) = (child, &rest[1..]);
            continue;
        }
        // An item, which this module may only pass on.
        let exports = sources[&at].split(';').filter(|it| it.contains("pub use ") || it.contains("pub(crate) use "));
        let declared = exports.filter_map(|it| it.rsplit_once("use ")).find_map(|(_, list)| {
            let mut shared = BTreeSet::new();
            read_path(list, &[], &mut shared);
            shared.into_iter().find(|shared| shared.last() == Some(name) && shared.len() > 1)
        });
        return match declared {
            Some(declared) => target(sources, &at, &declared),
            None => Some(at),
        };
    }
    Some(at)
}

/// The modules that each module names.
fn edges(sources: &Sources) -> BTreeMap<Module, BTreeSet<Module>> {
    let of = |(module, text): (&Module, &String)| {
        let named = paths(text).into_iter().filter_map(|path| target(sources, module, &path));
        (module.clone(), named.filter(|other| other != module && !other.is_empty()).collect())
    };
    sources.iter().filter(|(module, _)| !module.is_empty()).map(of).collect()
}

fn reached(edges: &BTreeMap<Module, BTreeSet<Module>>, from: &Module) -> BTreeSet<Module> {
    let (mut reached, mut open) = (BTreeSet::new(), vec![from.clone()]);
    while let Some(module) = open.pop() {
        let next = edges[&module].iter().filter(|next| reached.insert((*next).clone()));
        open.extend(next.cloned().collect::<Vec<_>>());
    }
    reached
}

/// The sets of modules that need each other.
fn circles(edges: &BTreeMap<Module, BTreeSet<Module>>) -> BTreeSet<BTreeSet<Module>> {
    let reached: BTreeMap<&Module, BTreeSet<Module>> =
        edges.keys().map(|module| (module, reached(edges, module))).collect();
    let circle = |module: &&Module| -> BTreeSet<Module> {
        reached[*module].iter().filter(|other| reached[other].contains(*module)).cloned().collect()
    };
    edges.keys().map(|module| circle(&module)).filter(|circle| !circle.is_empty()).collect()
}

/// Whether a circle is one module and its own submodules.
fn is_of_one_module(circle: &BTreeSet<Module>) -> bool {
    circle.iter().any(|root| circle.iter().all(|module| module.starts_with(root)))
}

#[test]
fn modules_form_no_circle() {
    check("rmsnorm-conformance");
}

#[test]
fn modules_of_the_cuda_backend_form_no_circle() {
    check("rmsnorm-cuda");
}

/// Checks a package of this repository. Outside of it there is only this one.
fn check(package: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(package).join("src");
    if !folder.is_dir() {
        return;
    }
    let mut sources = Sources::new();
    read(&folder, &Vec::new(), &mut sources);
    let edges = edges(&sources);
    assert!(edges.len() > 30 && edges.values().map(BTreeSet::len).sum::<usize>() > 90, "{edges:?}");
    let inner = |module: &Module, circle: &BTreeSet<Module>| {
        let to = edges[module].intersection(circle).map(|to| to.join("::")).collect::<Vec<_>>().join(" ");
        format!("{} -> {to}", module.join("::"))
    };
    let found = circles(&edges).into_iter().filter(|circle| !is_of_one_module(circle));
    let found: Vec<Vec<String>> =
        found.map(|circle| circle.iter().map(|module| inner(module, &circle)).collect()).collect();
    assert!(found.is_empty(), "circles of modules: {found:#?}");
}

/// The reader finds imports in lists, inline paths and re-exports, and ignores comments and tests.
#[test]
fn paths_lead_to_the_module_that_declares_the_item() {
    let texts = [
        (vec![], "mod a; mod b; pub use a::{Item, c::Other};"),
        (vec!["a"], "mod c;\nuse crate::{Item, b::{self, Thing}};\n// use crate::d::X;\nfn f() { c::g() }"),
        (vec!["a", "c"], "use super::Item;\n#[cfg(test)]\nmod tests {\n    use crate::b::Thing;\n}\n"),
        (vec!["b"], "fn f(it: crate::Other) { it }"),
    ];
    let sources: Sources = texts
        .into_iter()
        .map(|(module, text)| (module.into_iter().map(str::to_owned).collect(), product(text)))
        .collect();
    let edges = edges(&sources);
    let of = |module: &[&str]| {
        let module: Module = module.iter().map(|name| (*name).to_owned()).collect();
        edges[&module].iter().map(|to| to.join("::")).collect::<Vec<_>>()
    };
    assert_eq!(
        (of(&["a"]), of(&["a", "c"]), of(&["b"])),
        (vec!["a::c".into(), "b".into()], vec!["a".into()], vec!["a::c".to_owned()])
    );
    let all = circles(&edges);
    assert_eq!(all.len(), 1);
    assert!(all.iter().all(|circle| circle.len() == 3 && !is_of_one_module(circle)), "{all:?}");
}
