//! Every command block of the book is executed, on a node where the tenants `web` and `night` run. (What cannot
//! be executed everywhere is marked as text there.)

use std::{fs, path::Path};

use gpumux_tests::{Run, binary};

#[test]
fn the_commands_of_the_book_work() {
    let (node, _processes) = crate::seen::busy();
    let book = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let path = format!(
        "{}:{}",
        binary().parent().unwrap().display(),
        std::env::var("PATH").unwrap()
    );
    let folder = tempfile::tempdir().unwrap();
    let mut count = 0;
    for page in ["getting-started", "concepts", "see-it", "troubleshooting"] {
        let text = fs::read_to_string(book.join(page).with_extension("md")).unwrap();
        for block in text.split("```sh\n").skip(1) {
            let block = block.split_once("```").expect(page).0;
            println!("{page}.md:\n{block}");
            let mut shell = node.on_device(["bash", "-euo", "pipefail", "-c", block]);
            let done = shell.current_dir(folder.path()).env("PATH", &path).run();
            assert!(done.status.success(), "{page}.md:\n{block}\n{done:?}");
            count += 1;
        }
    }
    assert!(count >= 6, "{count} blocks");
}
