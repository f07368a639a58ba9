//! One question to the daemon.

use std::time::Duration;

use gpumux_daemon::{
    api::types::Ended,
    client::{Client, ClientError},
    paths,
};

/// Between two looks for a daemon that is away.
pub(crate) const AWAY_PAUSE: Duration = Duration::from_millis(200);
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
        .map_err(ClientError::Unable)?
        .block_on(question(Client::new(paths::find())))
}

/// Asks about a tenant; where there is none of this name, the error tells if one has ended, or suggests a similar name.
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
        let ends = client.ended().await.unwrap_or_default();
        let tenants: Vec<&str> = tenants.iter().map(|it| &*it.name).collect();
        let ends: Vec<&str> = ends.iter().map(|it| &*it.name).collect();
        let message = message + &hint(name, &tenants, &ends);
        Err(ClientError::Refused {
            status: 404,
            message,
        })
    })
}

/// What a message about a name that no tenant has ends with, by the names of tenants that run and that have ended.
fn hint(name: &str, tenants: &[&str], ends: &[&str]) -> String {
    let own = name.rsplit('/').next().unwrap_or(name);
    if ends.contains(&own) {
        return "; the last one of this name has ended: see `gpumux ps -a`".into();
    }
    if let Some(other) = similar(own, tenants) {
        return format!("; a similar name is `{other}`");
    }
    similar(own, ends).map_or_else(String::new, |other| {
        format!("; a similar name is `{other}`, which has ended")
    })
}

/// There is no tenant of this name, and none is known to have ended.
pub(crate) fn unknown(name: &str) -> ClientError {
    ClientError::Refused {
        status: 404,
        message: format!(
            "no tenant is called `{name}`, and none that ended lately: see `gpumux ps -a`"
        ),
    }
}

/// The name that is most like another one, if any is.
pub(crate) fn similar<'a>(name: &str, all: &[&'a str]) -> Option<&'a str> {
    // In a short name two letters in the wrong order are most of it.
    let likeness = |other: &str| match strsim::osa_distance(name, other) {
        1 => 1.0,
        _ => strsim::jaro_winkler(name, other),
    };
    let alike = |other: &&'a str| (likeness(other), *other);
    let best = all
        .iter()
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

/// Whether there is no daemon now, but its folder: another is likely to come.
pub(crate) fn is_away(error: &ClientError) -> bool {
    match error {
        ClientError::NoDaemon { .. } => paths::find().exists(),
        error => error.is_leaving(),
    }
}

/// Waits until a tenant of this name has ended; one that has ended already is found as long as the daemon keeps it. A daemon that goes away
/// meanwhile is waited for.
///
/// # Errors
/// The client's; there is, and was, no tenant of this name.
pub(crate) async fn until_ended(client: &Client, name: &str) -> Result<Ended, ClientError> {
    let mut seen = None;
    let mut told = false;
    loop {
        match end_of(client, name, &mut seen).await {
            // It was there when it was asked first.
            Err(error) if error.is_leaving() || ((told || seen.is_some()) && is_away(&error)) => {
                if !std::mem::replace(&mut told, true) {
                    eprintln!("gpumux: {error}; waiting until it is back");
                }
                tokio::time::sleep(AWAY_PAUSE).await;
            }
            // So many clients are connected, or follow events, that this one has to look again.
            Err(ClientError::Refused { status: 429, .. }) if seen.is_some() => {
                tokio::time::sleep(AWAY_PAUSE).await;
            }
            Ok(None) => {}
            Ok(Some(end)) => return Ok(end),
            Err(error) => return Err(error),
        }
    }
}

/// Since when it is, its user and its name.
type Seen = (u64, u32, String);

/// The end of a tenant of this name, the first one that was `seen`; none: something has happened, perhaps not to it.
async fn end_of(
    client: &Client,
    name: &str,
    seen: &mut Option<Seen>,
) -> Result<Option<Ended>, ClientError> {
    let lives = match client.tenant(name).await {
        // The next one of the same name is another one.
        Ok(tenant) => {
            let now = (tenant.since, tenant.uid, tenant.name);
            *seen.get_or_insert_with(|| now.clone()) == now
        }
        Err(ClientError::Refused { status: 404, .. }) => false,
        Err(error) => return Err(error),
    };
    if !lives {
        let ends = client.ended().await?;
        let is_it = |end: &Ended| {
            let known = (end.since, end.uid, end.name.clone());
            seen.as_ref().is_none_or(|seen| *seen == known)
        };
        return match last_end(ends, name, is_it) {
            Some(end) => Ok(Some(end)),
            // It ended, and so many others since that nothing is known of it.
            None if seen.is_some() => Err(ClientError::Refused {
                status: 410,
                message: format!("`{name}` has ended; its exit code is not known"),
            }),
            None => Err(unknown(name)),
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
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        os::unix::net::UnixListener,
    };

    use gpumux_daemon::api::types::{Exit, Tenant};
    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn end_is_found_without_a_place_to_connect_or_follow_events() {
        let dir = tempfile::tempdir().unwrap();
        let client = Client::new(dir.path());
        let listener = UnixListener::bind(paths::api_socket(dir.path())).unwrap();
        let lives = json!(Tenant {
            name: "a".into(),
            ..Tenant::default()
        });
        let ended = Ended {
            name: "a".into(),
            uid: 0,
            user: "root".into(),
            class: "standard".into(),
            command: String::new(),
            since: 0,
            at: 0,
            exit: Exit::default(),
            reason: String::new(),
            noteworthy: false,
            log: None,
        };
        let none = json!({"error": ""});
        let ends = json!([&ended]);
        let daemon = std::thread::spawn(move || {
            for (status, body) in [
                (200, &lives),
                (429, &none),
                (429, &none),
                (404, &none),
                (200, &ends),
            ] {
                let mut stream = listener.accept().unwrap().0;
                let _ = stream.read(&mut [0; 4096]).unwrap();
                let body = body.to_string();
                let length = body.len();
                write!(
                    stream,
                    "HTTP/1.1 {status} It\r\ncontent-length: {length}\r\n\r\n{body}"
                )
                .unwrap();
            }
        });
        assert_eq!(until_ended(&client, "a").await.unwrap(), ended);
        daemon.join().unwrap();
    }

    #[test]
    fn typo_in_a_name_has_a_suggestion() {
        let all = ["train", "serve", "night-2", "web"];
        for (name, suggested) in [
            ("trian", Some("train")),
            ("sevre", Some("serve")),
            ("night", Some("night-2")),
            ("wbe", Some("web")),
            ("xyz", None),
        ] {
            assert_eq!(similar(name, &all), suggested, "{name}");
        }
    }

    #[test]
    fn unknown_name_has_the_way_to_the_right_one() {
        let (tenants, ends) = (["train", "web"], ["night", "train"]);
        for (name, expected) in [
            ("night", "the last one of this name has ended"),
            ("alice/night", "the last one of this name has ended"),
            ("trian", "; a similar name is `train`"),
            ("nightt", "`night`, which has ended"),
        ] {
            let hint = hint(name, &tenants, &ends);
            assert!(hint.contains(expected), "{name}: {hint}");
        }
        assert_eq!(hint("xyz", &tenants, &ends), "");
    }
}
