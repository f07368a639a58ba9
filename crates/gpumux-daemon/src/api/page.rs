//! The web page: one file that loads nothing else.

use axum::{
    Json,
    http::header::{self, HeaderName},
    response::IntoResponse,
};

use super::{
    context::{Caller, Shared},
    types::Me,
};
use crate::{secret::secret, tenants::Tenant};

/// Its own script and styles are marked with a number that cannot be guessed.
const PAGE: &str = include_str!("page.html");
const MARK: &str = "NONCE";

/// The page.
pub(super) async fn page() -> impl IntoResponse {
    let nonce = secret();
    // It runs what is in it, talks to this address only, and makes no HTML of text.
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; \
         frame-ancestors 'none'; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    );
    let headers: [(HeaderName, String); 6] = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8".into()),
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".into()),
        (header::REFERRER_POLICY, "no-referrer".into()),
        (header::CACHE_CONTROL, "no-store".into()),
        (
            HeaderName::from_static("cross-origin-opener-policy"),
            "same-origin".into(),
        ),
    ];
    (headers, PAGE.replace(MARK, &nonce))
}

/// The client's user and tenant, which are known on the Unix socket only.
#[utoipa::path(get, path = "/v1/me", responses((status = 200, body = Me)))]
pub(super) async fn me(api: Shared, peer: Caller) -> Json<Me> {
    // The kernel translates the number of a process in another pid namespace; 0: the daemon does not see that one.
    let own = async || {
        let seen = api.seen().await.ok()?;
        let own = |it: &&Tenant| peer.pid != 0 && it.pids.contains(&peer.pid);
        let tenant = seen.tenants.iter().find(own)?;
        seen.names.get(&tenant.id).cloned()
    };
    Json(Me {
        uid: peer.uid,
        tenant: own().await,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_marks_its_script_and_style_and_nothing_else() {
        assert_eq!(PAGE.matches(MARK).count(), 2);
        for mark in ["<script nonce=\"NONCE\">", "<style nonce=\"NONCE\">"] {
            assert_eq!(PAGE.matches(mark).count(), 1, "{mark}");
        }
        for forbidden in [
            "innerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            " style=\"",
            "onclick=\"",
        ] {
            assert!(!PAGE.contains(forbidden), "{forbidden}");
        }
    }
}
