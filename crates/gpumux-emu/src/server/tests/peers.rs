//! Peers that break the rules, and servers that compete for a socket.

use super::*;

#[test]
fn rule_breakers_lose_only_their_own_connection() {
    let running = start(Profile::default());
    let mut program = Program::start(&running.path);
    let honest = ProcessConnection::open(&running.path).unwrap();
    for garbage in [
        vec![0],
        vec![0xff; 100],
        emulated::MAGIC.to_ne_bytes().to_vec(),
        [emulated::MAGIC.to_ne_bytes().as_slice(), &[0xff; 60]].concat(),
        vec![7; protocol::MAX_PACKET + 1],
        protocol::encode(&Request::Devices).unwrap(),
    ] {
        let socket = open_control_file(&running.path).unwrap();
        let _ = rustix::io::write(&socket, &garbage);
        // The server hangs up.
        let mut byte = [0];
        let _ = rustix::io::read(&socket, &mut byte);
    }
    let idle: Vec<_> = (0..500)
        .map_while(|_| open_control_file(&running.path).ok())
        .collect();
    // A client that submits and never reads.
    let mut deaf = Program::start(&running.path);
    for _ in 0..2 * MAX_UNREAD {
        let items = vec![Work::Record; 1];
        deaf.next += 1;
        let id = deaf.next;
        let items = items
            .into_iter()
            .map(|work| Submission {
                stream: 1,
                priority: 0,
                id,
                queue: Queue::Compute,
                work,
                prompt: true,
            })
            .collect();
        let at = client::now();
        if deaf.execution.send(&Command::Submit { at, items }).is_err() {
            break;
        }
    }
    assert_eq!(honest.devices().unwrap().len(), 1);
    program.submit(&[kernel(1000), Work::Record]);
    assert!(matches!(program.report(), Report::Done(_)));
    drop(idle);
}

#[test]
fn a_second_server_is_refused_and_a_dead_ones_socket_is_taken_over() {
    let running = start(Profile::default());
    assert!(matches!(
        Server::bind(Profile::default(), &running.path),
        Err(ServerError::InUse(_))
    ));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("left-over");
    let address = SocketAddrUnix::new(&path).unwrap();
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    bind(&socket, &address).unwrap();
    drop(socket);
    assert!(path.exists());
    let server = Server::bind(Profile::default(), &path).unwrap();
    let handle = server.spawn().unwrap();
    let connection = ProcessConnection::open(&path).unwrap();
    handle.stop().unwrap();
    assert!(!path.exists());
    assert!(matches!(connection.devices(), Err(ClientError::Lost(_))));
    // A plain file is not removed.
    let path = dir.path().join("file");
    std::fs::File::create(&path)
        .unwrap()
        .write_all(b"x")
        .unwrap();
    assert!(Server::bind(Profile::default(), &path).is_err());
}
