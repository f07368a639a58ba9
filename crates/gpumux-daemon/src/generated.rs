//! Pages of the documents that tests make from the code.

/// Asserts that this page of `docs/` is this text; with `UPDATE_DOCS` in the environment it is written first.
#[track_caller]
pub(crate) fn assert_page(page: &str, text: &str) {
    let file = format!("{}/../../docs/{page}", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&file, text).unwrap();
    }
    assert_eq!(
        std::fs::read_to_string(file).unwrap(),
        text,
        "run `UPDATE_DOCS=1 cargo test -p gpumux-daemon reference`"
    );
}
