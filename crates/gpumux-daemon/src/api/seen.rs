//! What the API shows, of one moment.

use std::collections::BTreeMap;

use gpumux_core::TenantId;

use super::{
    shown::show,
    types::{self, Fault},
};
use crate::{
    scheduler::View,
    tenants::{self, GroupCounts, Tenant, TenantError},
};

/// All that there is.
#[derive(Clone)]
pub(crate) struct Seen {
    pub(super) view: View,
    pub(super) tenants: Vec<Tenant>,
    pub(super) names: BTreeMap<TenantId, String>,
    pub(super) faults: Vec<Fault>,
    pub(super) groups: BTreeMap<String, GroupCounts>,
}

impl Seen {
    pub(super) fn find(&self, uid: Option<u32>, name: &str) -> Result<&Tenant, TenantError> {
        tenants::find(self.tenants.iter(), uid, name)
    }

    pub(super) fn shown(&self) -> impl Iterator<Item = types::Tenant> {
        let tenants = self.tenants.iter().cloned();
        tenants.map(|tenant| show(tenant, &self.view))
    }
}
