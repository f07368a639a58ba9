//! Preparing and unpreparing claims: the steps between the kubelet's call and a container that can start.
//!
//! The order makes every step repeatable after a crash: the claim is recorded before anything is made, tenants and
//! the CDI file carry the claim's uid, and the record is the last thing that goes.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use futures_util::future::join_all;
use gpumux_core::TenantSpec;
use gpumux_daemon::{
    api::types::{NewTenant, SpecChange},
    client::{Client as Daemon, ClientError},
};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;
use tokio::sync::{mpsc, watch};

use crate::{
    cdi,
    checkpoint::{CheckpointError, Record, Store, TenantRecord},
    claim::{self, ClaimError, ClaimRef, Share},
    device::Device,
    events::Events,
    model::Use,
    share::{Patch, ShareError},
};

/// How long the API server may take. The kubelet gives up on a call after 45 s.
const API_PATIENCE: Duration = Duration::from_secs(15);

/// A point between two steps, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The claim was fetched and found good.
    Fetched,
    /// It is entered, but perhaps not yet on disk.
    Entered,
    /// It is on disk.
    Recorded,
    /// Its tenants are made.
    Tenants,
    /// Its CDI file is there.
    Described,
    /// It is recorded as ready.
    Ready,
    /// While it goes: the CDI file is gone.
    Undescribed,
    /// While it goes: its tenants are gone.
    Untenanted,
    /// While it goes: its record is gone.
    Forgotten,
}

impl Step {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Fetched,
        Self::Entered,
        Self::Recorded,
        Self::Tenants,
        Self::Described,
        Self::Ready,
        Self::Undescribed,
        Self::Untenanted,
        Self::Forgotten,
    ];
}

/// Why a claim is not prepared or unprepared. The text becomes the pod's event.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// The claim itself.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// It is not there.
    #[error("claim {0}/{1} does not exist (any more)")]
    Gone(String, String),
    /// The API server.
    #[error("cannot read the claim: {0}")]
    Api(#[from] kube::Error),
    /// The API server, too.
    #[error("cannot read the claim: the API server does not answer")]
    Slow,
    /// What must be remembered.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The daemon.
    #[error("gpumux: {0}")]
    Daemon(#[from] ClientError),
    /// The parameters.
    #[error(transparent)]
    Share(#[from] ShareError),
    /// The CDI file.
    #[error("cannot write the CDI file in {0}: {1}")]
    Cdi(PathBuf, std::io::Error),
    /// The driver itself failed.
    #[error("a task of the driver ended early: {0}")]
    Task(#[from] tokio::task::JoinError),
}

/// A device of a prepared claim, for the kubelet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// Which request of the claim.
    pub request: String,
    /// The pool.
    pub pool: String,
    /// The device as published.
    pub device: String,
    /// Tells shares of one device apart.
    pub share_id: Option<String>,
    /// What the runtime is to add.
    pub cdi_id: String,
}

/// Does what the kubelet asks. Cheap to clone.
#[derive(Clone)]
pub struct Engine {
    /// The node, which is also the pool.
    pub node: String,
    /// The API server.
    pub kube: kube::Client,
    /// The daemon.
    pub daemon: Daemon,
    /// What is remembered.
    pub store: Store,
    /// Where the container runtime looks for CDI files.
    pub cdi_dir: PathBuf,
    /// What goes into containers.
    pub host: Arc<cdi::Host>,
    /// The devices as last seen.
    pub devices: watch::Receiver<Arc<Vec<Device>>>,
    /// Told of claims that were prepared.
    pub news: mpsc::UnboundedSender<ClaimRef>,
    /// What is reported on claims for people.
    pub events: Events,
    /// Told after each step; for tests.
    pub after: fn(Step),
}

impl Engine {
    /// Prepares claims, each by itself and all at once. Each has its own result.
    pub async fn prepare(&self, claims: &[ClaimRef]) -> Vec<Result<Vec<Prepared>, PrepareError>> {
        join_all(claims.iter().map(|claim| async move {
            let result = self.prepare_one(claim).await;
            match &result {
                Ok(_) => drop(self.news.send(claim.clone())),
                Err(error) => {
                    tracing::warn!(claim = %claim.name, namespace = %claim.namespace, %error, "not prepared");
                }
            }
            result
        }))
        .await
    }

    /// Unprepares claims, each by itself and all at once. Each has its own result.
    pub async fn unprepare(&self, claims: &[ClaimRef]) -> Vec<Result<(), PrepareError>> {
        join_all(claims.iter().map(|claim| async move {
            let result = self.unprepare_one(claim).await;
            if let Err(error) = &result {
                tracing::warn!(claim = %claim.name, namespace = %claim.namespace, %error, "not unprepared");
            }
            result
        }))
        .await
    }

    async fn prepare_one(&self, claim: &ClaimRef) -> Result<Vec<Prepared>, PrepareError> {
        let _lock = self.lock(&claim.uid).await?;
        let known = self.store.get(&claim.uid)?;
        if let Some(record) = known.as_deref().filter(|record| record.ready) {
            // The kubelet asks again after its own restart: what went missing meanwhile comes back.
            self.make_tenants(record, true).await?;
            self.describe(record)?;
            return Ok(prepared(record));
        }
        let fetched = self.fetch(claim).await?;
        let devices = self.devices.borrow().clone();
        let shares = claim::shares(&fetched, claim, &self.node, &devices)?;
        (self.after)(Step::Fetched);
        let mut record = new_record(claim, &fetched, shares);
        let mut resumed = false;
        if let Some(known) = known {
            if known.shares == record.shares {
                record.tenants.clone_from(&known.tenants);
                resumed = true;
            } else {
                self.unmake(&known).await?;
            }
        }
        let made = self.make(&mut record, resumed).await;
        if let Err(error) = made {
            // Nothing stays half-prepared; what cannot be undone now, the kubelet's unprepare will.
            if let Err(error) = self.unmake(&record).await {
                tracing::warn!(claim = %claim.name, %error, "cannot undo");
            }
            return Err(error);
        }
        Ok(prepared(&record))
    }

    async fn make(&self, record: &mut Record, resumed: bool) -> Result<(), PrepareError> {
        let (store, entered) = (self.store.clone(), record.clone());
        let after = self.after;
        tokio::task::spawn_blocking(move || {
            store.admit(&entered)?;
            after(Step::Entered);
            store.sync()
        })
        .await??;
        (self.after)(Step::Recorded);
        for (index, environment) in self.make_tenants(record, resumed).await? {
            if let Some(tenant) = record.tenants.get_mut(index) {
                tenant.environment = environment;
            }
        }
        (self.after)(Step::Tenants);
        self.describe(record)?;
        (self.after)(Step::Described);
        record.ready = true;
        // This need not survive a power failure: pods do not either, and their claims are then prepared anew.
        self.store.write(record)?;
        (self.after)(Step::Ready);
        Ok(())
    }

    async fn unprepare_one(&self, claim: &ClaimRef) -> Result<(), PrepareError> {
        let _lock = self.lock(&claim.uid).await?;
        if let Some(record) = self.store.get(&claim.uid)? {
            return self.unmake(&record).await;
        }
        // Records go last: nothing of this claim is left, unless its record is damaged.
        self.undescribe(&claim.uid)?;
        if self.store.is_damaged()? {
            let prefix = tenant_prefix(&claim.uid);
            for tenant in self.daemon.tenants().await? {
                if tenant.name.starts_with(&prefix) {
                    self.end_tenant(&tenant.name).await?;
                }
            }
        }
        Ok(())
    }

    /// Undoes as much as can be undone; only when all is, the record goes.
    async fn unmake(&self, record: &Record) -> Result<(), PrepareError> {
        self.events.forget(&record.claim.uid);
        let mut undone = self.undescribe(&record.claim.uid);
        (self.after)(Step::Undescribed);
        for tenant in &record.tenants {
            undone = undone.and(self.end_tenant(&tenant.name).await);
        }
        undone?;
        (self.after)(Step::Untenanted);
        let (store, uid) = (self.store.clone(), record.claim.uid.clone());
        tokio::task::spawn_blocking(move || {
            store.remove(&uid)?;
            store.sync()
        })
        .await??;
        (self.after)(Step::Forgotten);
        Ok(())
    }

    /// Gives the daemon back the tenants of prepared claims that it does not know, as after a reboot of its state.
    ///
    /// # Errors
    /// The daemon, or the disk. What could be restored is.
    pub async fn restore(&self) -> Result<usize, PrepareError> {
        let records = self.store.all()?;
        let living = self.daemon.tenants().await?;
        let missing = |record: &Record| {
            record
                .tenants
                .iter()
                .any(|tenant| living.iter().all(|there| there.name != tenant.name))
        };
        let mut restored = 0;
        for record in records
            .into_iter()
            .filter(|record| record.ready && missing(record))
        {
            let _lock = self.lock(&record.claim.uid).await?;
            // It may have gone while we waited.
            if let Some(record) = self
                .store
                .get(&record.claim.uid)?
                .filter(|record| record.ready)
            {
                self.make_tenants(&record, true).await?;
                self.describe(&record)?;
                restored += 1;
            }
        }
        Ok(restored)
    }

    /// Brings a change of a running claim into force; none takes earlier changes back.
    ///
    /// # Errors
    /// The change makes no sense or is rejected; everything stays as it was.
    pub async fn resize(&self, uid: &str, patch: Option<&str>) -> Result<(), PrepareError> {
        let _lock = self.lock(uid).await?;
        let Some(record) = self.store.get(uid)?.filter(|record| record.ready) else {
            return Ok(());
        };
        if record.patch.as_deref() == patch {
            return Ok(());
        }
        let changed = Record {
            patch: patch.map(str::to_owned),
            ..record.as_ref().clone()
        };
        if let Err(error) = self.make_tenants(&changed, true).await {
            // Of several tenants, some may have been changed.
            let _ = self.make_tenants(&record, true).await;
            return Err(error);
        }
        Ok(self.store.write(&changed)?)
    }

    async fn fetch(&self, claim: &ClaimRef) -> Result<ResourceClaim, PrepareError> {
        let api: Api<ResourceClaim> = Api::namespaced(self.kube.clone(), &claim.namespace);
        let found = tokio::time::timeout(API_PATIENCE, api.get_opt(&claim.name))
            .await
            .map_err(|_| PrepareError::Slow)??;
        found.ok_or_else(|| PrepareError::Gone(claim.namespace.clone(), claim.name.clone()))
    }

    /// Makes the claim's tenants, or changes those that are there if they are known to be this record's. Returns what the processes
    /// of new ones need in their environment, by the tenant's index.
    async fn make_tenants(
        &self,
        record: &Record,
        known: bool,
    ) -> Result<Vec<(usize, BTreeMap<String, String>)>, PrepareError> {
        let mut made = Vec::new();
        for (index, new) in tenants(record)? {
            let name = new.name.as_deref().unwrap_or_default();
            let created = match self.daemon.create(&new).await {
                Err(ClientError::Refused { status: 409, .. }) if known => {
                    self.daemon.change(name, &new.spec).await?;
                    continue;
                }
                Err(ClientError::Refused { status: 409, .. }) => {
                    // Left by a claim whose record was lost: its secret is not ours.
                    self.end_tenant(name).await?;
                    self.daemon.create(&new).await?
                }
                created => created?,
            };
            made.push((index, created.environment));
        }
        Ok(made)
    }

    async fn end_tenant(&self, name: &str) -> Result<(), PrepareError> {
        match self.daemon.delete(name).await {
            Err(ClientError::Refused { status: 404, .. }) => Ok(()),
            other => Ok(other?),
        }
    }

    fn describe(&self, record: &Record) -> Result<(), PrepareError> {
        cdi::write(&self.cdi_dir, &self.host, record)
            .map_err(|e| PrepareError::Cdi(self.cdi_dir.clone(), e))
    }

    fn undescribe(&self, uid: &str) -> Result<(), PrepareError> {
        cdi::remove(&self.cdi_dir, uid).map_err(|e| PrepareError::Cdi(self.cdi_dir.clone(), e))
    }

    async fn lock(&self, uid: &str) -> Result<std::fs::File, PrepareError> {
        let (store, uid) = (self.store.clone(), uid.to_owned());
        Ok(tokio::task::spawn_blocking(move || store.lock_claim(&uid)).await??)
    }
}

/// The tenants as the daemon is to make them, by index. Shares of one tenant have the same size and parameters, so the first is
/// taken; the tenant is confined to the devices of all.
fn tenants(record: &Record) -> Result<Vec<(usize, NewTenant)>, ShareError> {
    let patch: Option<Patch> = record.patch.as_deref().map(str::parse).transpose()?;
    let one = |(index, tenant): (usize, &TenantRecord)| {
        let shares = record.shares.iter().zip(&record.tenant_of);
        let own = shares.filter_map(|(share, of)| (*of == Some(index)).then_some(share));
        let own: Vec<&Share> = own.collect();
        let first = own.first()?;
        let spec = match first.spec(patch.as_ref()) {
            Ok(spec) => spec,
            Err(error) => return Some(Err(error)),
        };
        let new = NewTenant {
            name: Some(tenant.name.clone()),
            spec: change(&spec),
            kept: true,
            trust: first.parameters.trust_domain.clone(),
            token: Some(tenant.token.clone()),
            devices: own.iter().map(|share| share.of.uuid.clone()).collect(),
            ..NewTenant::default()
        };
        Some(Ok((index, new)))
    };
    record.tenants.iter().enumerate().filter_map(one).collect()
}

fn new_record(claim: &ClaimRef, fetched: &ResourceClaim, shares: Vec<Share>) -> Record {
    let tenant_of = group(&shares);
    let count = tenant_of.iter().flatten().max().map_or(0, |last| last + 1);
    let pods = fetched
        .status
        .iter()
        .flat_map(|status| status.reserved_for.iter().flatten());
    Record {
        claim: claim.clone(),
        pods: pods
            .filter(|consumer| consumer.resource == "pods")
            .map(|consumer| (consumer.name.clone(), consumer.uid.clone()))
            .collect(),
        tenants: (0..count)
            .map(|index| TenantRecord {
                name: format!("{}{index}", tenant_prefix(&claim.uid)),
                token: gpumux_daemon::secret(),
                environment: BTreeMap::new(),
            })
            .collect(),
        shares,
        tenant_of,
        ready: false,
        patch: None,
    }
}

/// Which shares are one tenant: a guarantee holds on each device of a tenant, so shares of the same size on several devices
/// are one, as a job on several devices needs. Shares of one device never are, and a share that only looks is none.
fn group(shares: &[Share]) -> Vec<Option<usize>> {
    let mut groups: Vec<Vec<&Share>> = Vec::new();
    shares
        .iter()
        .map(|share| {
            if share.usage == Use::Admin {
                return None;
            }
            let joins = |members: &Vec<&Share>| {
                members.iter().all(|member| {
                    member.of.uuid != share.of.uuid
                        && member.usage == share.usage
                        && member.parameters == share.parameters
                })
            };
            let index = groups.iter().position(joins).unwrap_or(groups.len());
            if index == groups.len() {
                groups.push(Vec::new());
            }
            groups[index].push(share);
            Some(index)
        })
        .collect()
}

fn prepared(record: &Record) -> Vec<Prepared> {
    let one = |(index, share): (usize, &Share)| Prepared {
        request: share.request.clone(),
        pool: share.pool.clone(),
        device: share.device.clone(),
        share_id: share.share_id.clone(),
        cdi_id: cdi::id(&record.claim.uid, index),
    };
    record.shares.iter().enumerate().map(one).collect()
}

/// How the names of a claim's tenants begin.
pub fn tenant_prefix(uid: &str) -> String {
    format!("k8s-{uid}-")
}

/// All of the spec, but for what a claim does not choose: hints, and what becomes of requests for memory without room.
fn change(spec: &TenantSpec) -> SpecChange {
    SpecChange {
        hints: None,
        memory_policy: None,
        ..spec.into()
    }
}
