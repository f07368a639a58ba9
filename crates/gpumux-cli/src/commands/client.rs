//! One question to the daemon.

use gpumux_daemon::{
    api::types::Ended,
    client::{Client, ClientError},
    paths,
};

/// How alike a name must be to be suggested, of 1.
const ALIKE: f64 = 0.75;

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

/// Asks about a tenant; where there is none of this name, the error suggests one of a similar name.
///
/// # Errors
/// The client's.
pub(crate) fn about<T>(
    name: &str,
    question: impl AsyncFnOnce(Client) -> Result<T, ClientError>,
) -> Result<T, ClientError> {
    block(async |client| {
        let answer = question(client.clone()).await;
        let Err(ClientError::Refused {
            status: 404,
            message,
        }) = answer
        else {
            return answer;
        };
        let tenants = client.tenants().await.unwrap_or_default();
        let message = match similar(name, tenants.iter().map(|tenant| tenant.name.as_str())) {
            Some(other) => format!("{message}; a similar name is `{other}`"),
            None => message,
        };
        Err(ClientError::Refused {
            status: 404,
            message,
        })
    })
}

/// The name that is most like another one, if any is.
fn similar<'a>(name: &str, all: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let alike = |other: &'a str| (strsim::jaro_winkler(name, other), other);
    let best = all
        .map(alike)
        .filter(|(alike, other)| *alike >= ALIKE && *other != name);
    best.max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, other)| other)
}

/// The last end of a tenant that is asked for as `NAME` (one's own first) or `USER/NAME`, among those that `accept` takes.
pub(crate) fn last_end(
    ends: Vec<Ended>,
    asked: &str,
    accept: impl Fn(&Ended) -> bool,
) -> Option<Ended> {
    let (user, name) = match asked.rsplit_once('/') {
        Some((user, name)) => (Some(user), name),
        None => (None, asked),
    };
    let own = rustix::process::getuid().as_raw();
    let is_of =
        |end: &Ended| user.is_none_or(|user| user == end.user || user.parse() == Ok(end.uid));
    let ends = ends.into_iter().rev();
    let mut all: Vec<Ended> = ends
        .filter(|end| end.name == name && is_of(end) && accept(end))
        .collect();
    // Stable: the last of each stays first.
    all.sort_by_key(|end| end.uid != own);
    all.into_iter().next()
}

/// Waits until a tenant of this name has ended; one that has ended already is found as long as the daemon keeps it.
///
/// # Errors
/// The client's; there is, and was, no tenant of this name.
pub(crate) async fn until_ended(client: &Client, name: &str) -> Result<Ended, ClientError> {
    let mut seen: Option<(u64, u32, String)> = None;
    loop {
        let tenant = client.tenant(name).await;
        let lives = match &tenant {
            // The next one of the same name is another one.
            Ok(tenant) => {
                let now = (tenant.since, tenant.uid, tenant.name.clone());
                *seen.get_or_insert_with(|| now.clone()) == now
            }
            Err(ClientError::Refused { status: 404, .. }) => false,
            Err(_) => {
                tenant?;
                continue;
            }
        };
        if !lives {
            let ends = client.ended().await?;
            let is_it = |end: &Ended| {
                let known = (end.since, end.uid, end.name.clone());
                seen.as_ref().is_none_or(|seen| *seen == known)
            };
            return match (last_end(ends, name, is_it), tenant) {
                (Some(end), _) => Ok(end),
                // It ended, and so many others since that nothing is known of it.
                (None, Ok(_)) => Err(ClientError::Refused {
                    status: 410,
                    message: format!("`{name}` has ended; its exit code is not known"),
                }),
                (None, Err(error)) => Err(error),
            };
        }
        // From the first kept event on, so that none is missed between question and answer.
        let ended = |event: &gpumux_daemon::api::types::Event| {
            event.kind == gpumux_daemon::api::types::EventKind::Ended
                && seen.as_ref().is_none_or(|(at, uid, name)| {
                    event.tenant.as_ref() == Some(name)
                        && event.uid == Some(*uid)
                        && event.at_ms / 1000 >= *at
                })
        };
        client.events(Some(0), |event| !ended(&event)).await?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn typo_in_a_name_has_a_suggestion() {
        let all = ["train", "serve", "night-2"];
        for (name, suggested) in [
            ("trian", Some("train")),
            ("sevre", Some("serve")),
            ("night", Some("night-2")),
            ("xyz", None),
        ] {
            assert_eq!(similar(name, all.into_iter()), suggested, "{name}");
        }
    }
}
