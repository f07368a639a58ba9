//! One question to the daemon.

use gpumux_daemon::{
    client::{Client, ClientError},
    paths,
};

/// Asks the daemon of this user, or else the machine's.
///
/// # Errors
/// The client's, which say what to do.
pub(crate) fn block<T>(
    question: impl AsyncFnOnce(Client) -> Result<T, ClientError>,
) -> Result<T, ClientError> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a thread, a timer and an epoll file can be had")
        .block_on(question(Client::new(paths::find())))
}
