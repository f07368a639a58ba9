//! Memory of devices, and whose it is.

use super::*;

#[test]
fn memory_is_counted_shared_and_given_back() {
    let running = start(Profile {
        memory: 1 << 30,
        ..Profile::default()
    });
    let one = ProcessConnection::open(&running.path).unwrap();
    let used = |connection: &ProcessConnection| connection.status(0).unwrap().used;
    let (id, file) = one.create_memory(0, 600 << 20).unwrap();
    assert!(matches!(
        one.create_memory(0, 600 << 20),
        Err(ClientError::Refused(Refusal::OutOfMemory))
    ));
    let (imported, device, bytes, _) = one.import_memory(file.as_fd()).unwrap();
    assert_eq!((imported, device, bytes), (id, 0, 600 << 20));
    one.free_memory(id).unwrap();
    assert_eq!(used(&one), 600 << 20, "the importer still has it");
    one.free_memory(id).unwrap();
    assert_eq!(used(&one), 0);
    assert!(one.free_memory(id).is_err());
    assert!(one.import_memory(file.as_fd()).is_err(), "it is gone");
    let other = tempfile::tempfile().unwrap();
    assert!(one.import_memory(other.as_fd()).is_err());

    // With the process's last connection goes its memory. (The next one may come before the server has
    // seen the end of the last: then that one's end is it.)
    one.create_memory(0, 1 << 20).unwrap();
    drop(one);
    while used(&ProcessConnection::open(&running.path).unwrap()) > 0 {
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn exported_file_keeps_memory_that_its_process_has_freed() {
    let running = start(Profile {
        memory: 1 << 30,
        ..Profile::default()
    });
    let open = || ProcessConnection::open(&running.path).unwrap();
    let one = open();
    let (id, file) = one.create_memory(0, 600 << 20).unwrap();
    let export = || client::export_memory(&running.path, id, file.as_fd());
    let (exported, again) = (export().unwrap(), export().unwrap());
    let other = tempfile::tempfile().unwrap();
    assert!(client::export_memory(&running.path, id, other.as_fd()).is_err());
    rustix::io::pwrite(&file, b"kept", 0).unwrap();
    one.free_memory(id).unwrap();
    drop((one, file, again));
    let two = open();
    let (found, device, bytes, file) = two.import_memory(exported.as_fd()).unwrap();
    assert_eq!((found, device, bytes), (id, 0, 600 << 20));
    let mut contents = [0; 4];
    rustix::io::pread(&file, &mut contents, 0).unwrap();
    assert_eq!(&contents, b"kept");
    drop(exported);
    assert_eq!(two.status(0).unwrap().used, 600 << 20);
    two.free_memory(id).unwrap();
    while two.status(0).unwrap().used > 0 {
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn memory_of_an_ended_process_stays_taken_for_a_while() {
    let running = start(Profile {
        memory: 1 << 30,
        release_ms: 60_000,
        ..Profile::default()
    });
    let one = ProcessConnection::open(&running.path).unwrap();
    let (_, file) = one.create_memory(0, 600 << 20).unwrap();
    drop(one);
    // Once the server has noticed the end, nothing is to be imported any more.
    let open = || ProcessConnection::open(&running.path).unwrap();
    while open().import_memory(file.as_fd()).is_ok() {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(open().status(0).unwrap().used, 600 << 20);
}

#[test]
fn a_context_takes_memory_and_needs_it() {
    let running = start(Profile {
        memory: 1 << 30,
        ..Profile::default()
    });
    let program = Program::start(&running.path);
    let watcher = ProcessConnection::open(&running.path).unwrap();
    let status = watcher.status(0).unwrap();
    assert_eq!(status.used, 520 << 20);
    assert_eq!(status.processes, [(std::process::id(), 520 << 20)]);
    let second = Execution::open(
        program.file.as_fd(),
        program.group.client,
        program.group.group,
        program.group.group,
        program.group.group,
    );
    assert!(matches!(
        second,
        Err(ClientError::Rm(RmStatus::INVALID_ARGUMENT))
    ));
    drop(program);
    while watcher.status(0).unwrap().used > 0 {
        thread::sleep(Duration::from_millis(1));
    }
}
