//! Control files: controls, freezes, and their end.

use super::*;

/// A server that a test takes from step to step.
struct Stepped {
    server: Server,
    buffer: Vec<u8>,
    _dir: tempfile::TempDir,
}

impl Stepped {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = Server::bind(Profile::default(), &dir.path().join("emu.sock")).unwrap();
        Self {
            server,
            buffer: vec![0; protocol::MAX_PACKET],
            _dir: dir,
        }
    }

    fn step(&mut self) -> bool {
        self.server.core.step(&mut self.buffer).unwrap()
    }

    /// Calls `client` on another thread and `meanwhile` here, then serves until the client is done.
    fn serve<T: Send, U>(
        &mut self,
        client: impl FnOnce() -> T + Send,
        meanwhile: impl FnOnce(&mut Self) -> U,
    ) -> (T, U) {
        let stop = std::sync::Arc::clone(&self.server.stop);
        thread::scope(|scope| {
            let client = scope.spawn(|| {
                let done = client();
                signal(&stop);
                done
            });
            let found = meanwhile(self);
            while self.step() {}
            rustix::io::read(&*stop, &mut [0; 8]).unwrap();
            (client.join().unwrap(), found)
        })
    }
}

#[test]
fn a_freeze_waits_for_the_effects_of_interrupted_kernels() {
    let running = start(Profile::default());
    let mut program = Program::start(&running.path);
    let ids = program.submit(&[kernel(1_000_000 * MILLI), Work::Record]);
    let controls = program.controls();
    let (told, answers) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            // The kernel runs when the freeze arrives: nothing was submitted before it.
            controls.freeze().unwrap();
            told.send(()).unwrap();
            controls.thaw().unwrap();
        });
        let Report::Progress { token, works } = program.report() else {
            panic!("no progress report");
        };
        assert!(answers.try_recv().is_err(), "answered too early");
        let [(id, part, total)] = works[..] else {
            panic!("one kernel runs");
        };
        assert_eq!(id, ids[0]);
        assert!(0 < part && part < total);
        program
            .execution
            .send(&Command::Progressed { token })
            .unwrap();
        answers.recv().unwrap();
        assert!(matches!(program.report(), Report::Thawed));
    });
}

#[test]
fn a_freeze_does_not_wait_for_a_program_that_does_not_read() {
    let mut stepped = Stepped::new();
    let path = stepped.server.path().to_owned();
    let (mut program, ()) = stepped.serve(|| Program::start(&path), |_| ());
    program.submit(&[kernel(u64::MAX)]);
    let id = loop {
        let connections = &stepped.server.core.connections;
        let is_busy = |role: &Role| matches!(role, Role::Execution(it) if !it.works.is_empty());
        match connections.iter().find(|(_, it)| is_busy(&it.role)) {
            Some((id, _)) => break *id,
            None => assert!(stepped.step()),
        }
    };
    while stepped.server.core.connections[&id].unsent.len() < MAX_UNREAD {
        stepped.server.core.send(id, &Report::Thawed, None);
    }
    let controls = program.controls();
    // The request for progress is one packet too many.
    let (done, waits) = stepped.serve(
        || controls.freeze(),
        |stepped| {
            while stepped.server.core.connections.contains_key(&id) {
                stepped.step();
            }
            !stepped.server.core.freezes.is_empty()
        },
    );
    done.unwrap();
    assert!(!waits, "for a connection that is closed");
}

#[test]
fn slices_reach_the_driver_through_a_passed_file_only() {
    let running = start(Profile::default());
    let program = Program::start(&running.path);
    let controls = program.controls();
    assert_eq!(controls.timeslice().unwrap(), 1024);
    controls.set_timeslice(1).unwrap();
    assert_eq!(controls.timeslice().unwrap(), 1);
    let text = crate::protocol::uuid_text(&Profile::default().uuid(0));
    assert_eq!(controls.device_uuid().unwrap(), text);

    let own = EmulatedFile::new(open_control_file(&running.path).unwrap()).unwrap();
    let error = RmControls::new(own, program.group.clone())
        .set_timeslice(5)
        .unwrap_err();
    assert_eq!(error.cause, Cause::NotOwner);
    assert_eq!(controls.timeslice().unwrap(), 1);
}

#[test]
fn the_last_close_of_the_file_ends_the_context() {
    let running = start(Profile::default());
    let program = Program::start(&running.path);
    let copy = program.file.try_clone().unwrap();
    drop(program.file);
    let file = EmulatedFile::new(copy).unwrap();
    let mut params = TimesliceParams::default();
    let (client, group) = (program.group.client, program.group.group);
    file.control(client, group, cmd::GET_TIMESLICE, params.as_mut_bytes())
        .unwrap();
    drop(file);
    assert_eq!(program.execution.receive().unwrap(), None);
}
