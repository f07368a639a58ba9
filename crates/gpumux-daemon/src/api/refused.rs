//! Answers that are no success: which status each error has.

use axum::{
    Json,
    extract::rejection::JsonRejection,
    http::StatusCode,
    response::{IntoResponse, Response},
};

use super::types::Problem;
use crate::{
    memory::MoveError, relocation::RelocationError, scheduler::Stopped, tenants::TenantError,
};

/// An answer that is not a success.
#[derive(Debug)]
pub(super) struct Refused(pub(super) StatusCode, pub(super) String);

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        (self.0, Json(Problem { error: self.1 })).into_response()
    }
}

impl From<TenantError> for Refused {
    fn from(error: TenantError) -> Self {
        let status = match &error {
            TenantError::Unknown(_)
            | TenantError::UnknownToken
            | TenantError::NothingSet(_)
            | TenantError::NothingKnown(_) => StatusCode::NOT_FOUND,
            TenantError::NotYours(_) | TenantError::OtherUser { .. } | TenantError::NotTrusted => {
                StatusCode::FORBIDDEN
            }
            TenantError::Taken(_)
            | TenantError::Ambiguous(..)
            | TenantError::Busy(..)
            | TenantError::HintsOff(_)
            | TenantError::NoHints(..)
            | TenantError::NoProcess(_)
            | TenantError::StoppedProcess(..) => StatusCode::CONFLICT,
            TenantError::BadName(_)
            | TenantError::BadTrust(_)
            | TenantError::BadFingerprint(_)
            | TenantError::BadPercent(_)
            | TenantError::TooManyRanks(_)
            | TenantError::BadCurve
            | TenantError::BadBandwidth
            | TenantError::BadToken
            | TenantError::BadSignal(_)
            | TenantError::NoDevice(..)
            | TenantError::TooManyDevices(_)
            | TenantError::Refused(_)
            | TenantError::Set(..) => StatusCode::UNPROCESSABLE_ENTITY,
            TenantError::Invisible => StatusCode::BAD_REQUEST,
            TenantError::TooMany(..) | TenantError::Full(_) => StatusCode::TOO_MANY_REQUESTS,
            TenantError::Stopped(_) => StatusCode::SERVICE_UNAVAILABLE,
            TenantError::Save(..) | TenantError::NotKept(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self(status, error.to_string())
    }
}

impl From<MoveError> for Refused {
    fn from(error: MoveError) -> Self {
        let status = match &error {
            MoveError::Stopped(_) => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::CONFLICT,
        };
        Self(status, error.to_string())
    }
}

impl From<RelocationError> for Refused {
    fn from(error: RelocationError) -> Self {
        let status = match &error {
            RelocationError::Stopped(_) => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::CONFLICT,
        };
        Self(status, error.to_string())
    }
}

impl From<Stopped> for Refused {
    fn from(error: Stopped) -> Self {
        TenantError::from(error).into()
    }
}

impl From<JsonRejection> for Refused {
    fn from(error: JsonRejection) -> Self {
        Self(error.status(), error.body_text())
    }
}
