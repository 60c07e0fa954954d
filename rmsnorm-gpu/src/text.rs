//! Texts of programs: constants for the files of a folder, made by [`sources`](crate::sources).

use rmsnorm_tuning::file::{NO_TEXT, hash};

/// One file of such a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// Its path in the repository, as compilers' messages show it.
    pub path: &'static str,
    /// Its content.
    pub text: &'static str,
}

/// A hash of all these texts.
pub const fn revision(sources: &[Source]) -> u64 {
    let (mut revision, mut file) = (NO_TEXT, 0);
    while file < sources.len() {
        revision = hash(revision, sources[file].text);
        file += 1;
    }
    revision
}

/// Defines a constant for each listed file of the crate's folder. Arguments: the folder's name in
/// the repository, then a name and a file for each constant. Also defines `ALL`, `REVISION`, and a
/// test that every file with one of the endings is listed.
#[macro_export]
macro_rules! sources {
    ($folder:literal, $endings:expr; $($name:ident = $file:literal,)*) => {
        pub use $crate::text::Source;

        $(
            #[doc = concat!("`", $file, "`")]
            pub const $name: Source = Source { path: concat!($folder, "/", $file), text: include_str!($file) };
        )*

        /// Every file.
        pub const ALL: &[Source] = &[$($name),*];

        /// A hash of all these texts. As a constant it does not copy them into the binary that uses
        /// it.
        pub const REVISION: u64 = $crate::text::revision(ALL);

        #[cfg(test)]
        #[test]
        fn every_file_of_the_folder_is_listed() {
            use std::collections::BTreeSet;
            let names = ["", "pieces/"].into_iter().flat_map(|below| {
                let files = std::fs::read_dir(format!("{}/{below}", env!("CARGO_MANIFEST_DIR"))).into_iter().flatten();
                files.map(move |file| format!("{}/{below}{}", $folder, file.expect("a file").file_name().display()))
            });
            let there = names.filter(|name| $endings.iter().any(|ending| name.ends_with(ending)));
            assert_eq!(there.collect::<BTreeSet<_>>(), ALL.iter().map(|source| source.path.into()).collect());
        }
    };
}
