//! Preparing and unpreparing claims: the steps between the kubelet's call and a container that can start.
//!
//! The order makes every step repeatable after a crash: the claim is recorded before anything is made, tenants and
//! the CDI file carry the claim's uid, and the record is the last thing that goes.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use futures_util::future::join_all;
use gpumux_core::TenantSpec;
use gpumux_daemon::{
    api::types::{Mig, MigCompute, MigGpu, NewMigInstance, NewTenant, SpecChange},
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
    mig::{self, Next, Offer, Place},
    model::Use,
    share::{Patch, ShareError},
};

/// How long the API server may take. The kubelet gives up on a call after 45 s.
const API_PATIENCE: Duration = Duration::from_secs(15);

/// A point between two steps, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// The claim was fetched and found good.
    Fetched,
    /// It is entered, but perhaps not yet on disk.
    Entered,
    /// It is on disk.
    Recorded,
    /// Its MIG instances are made.
    Partitioned,
    /// They are recorded.
    Named,
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
    /// While it goes: its MIG instances are gone.
    Unpartitioned,
    /// While it goes: its record is gone.
    Forgotten,
}

impl Step {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::Fetched,
        Self::Entered,
        Self::Recorded,
        Self::Partitioned,
        Self::Named,
        Self::Tenants,
        Self::Described,
        Self::Ready,
        Self::Undescribed,
        Self::Untenanted,
        Self::Unpartitioned,
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
    /// A MIG instance.
    #[error("cannot make the MIG instance: {0}")]
    Blocked(String),
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
            let record = self.renew(record).await?;
            return Ok(prepared(&record));
        }
        let fetched = self.fetch(claim).await?;
        let devices = self.devices.borrow().clone();
        let shares = claim::shares(&fetched, claim, &self.node, &devices)?;
        (self.after)(Step::Fetched);
        let mut record = new_record(claim, &fetched, shares);
        let mut resumed = false;
        if let Some(known) = known {
            if are_same(&known.shares, &record.shares) {
                record.tenants.clone_from(&known.tenants);
                record.shares.clone_from(&known.shares);
                resumed = true;
            } else {
                self.unmake(&known).await?;
            }
        }
        // An instance that is there before the record names its place is another's.
        self.check_places(&mut record).await?;
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
        self.make_instances(record, resumed).await?;
        (self.after)(Step::Partitioned);
        if has_offers(record) {
            self.write(record).await?;
        }
        (self.after)(Step::Named);
        // No container has begun: of tenants that are there, the record does not have the environment.
        self.make_tenants(record, false).await?;
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
        // Records go last, but one may be damaged, and the daemon may make a tenant after it was waited for.
        self.undescribe(&claim.uid)?;
        let prefix = tenant_prefix(&claim.uid);
        for tenant in self.daemon.tenants().await? {
            if tenant.name.starts_with(&prefix) {
                self.end_tenant(&tenant.name).await?;
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
        if has_offers(record) {
            self.remove_instances(record).await?;
        }
        (self.after)(Step::Unpartitioned);
        let (store, uid) = (self.store.clone(), record.claim.uid.clone());
        tokio::task::spawn_blocking(move || {
            store.remove(&uid)?;
            store.sync()
        })
        .await??;
        (self.after)(Step::Forgotten);
        Ok(())
    }

    /// Brings back what a prepared claim had and what has gone missing meanwhile: its MIG instances, tenants and CDI file. The claim's
    /// record as it is then.
    async fn renew(&self, record: &Record) -> Result<Record, PrepareError> {
        let mut now = record.clone();
        if has_offers(record) && has_lost(record, &self.daemon.mig_gpus().await?) {
            // As before they were made: what is made at their places is the claim's, whatever its UUID.
            for of in offered(&mut now) {
                (of.uuid, of.mig) = (String::new(), None);
            }
            self.write(&now).await?;
            // They are confined to instances that are gone.
            for tenant in &record.tenants {
                self.end_tenant(&tenant.name).await?;
            }
            self.make_instances(&mut now, true).await?;
            self.write(&now).await?;
        }
        let made = self.make_tenants(&mut now, true).await;
        // Also if not all could be made: those that were are known from now on.
        if now.tenants != record.tenants {
            self.store.write(&now)?;
        }
        made?;
        self.describe(&now)?;
        Ok(now)
    }

    /// Checks that the places that a claim was allocated are free, unless its record named them before, and has it name them.
    async fn check_places(&self, record: &mut Record) -> Result<(), PrepareError> {
        if !has_offers(record) {
            return Ok(());
        }
        let gpus = self.daemon.mig_gpus().await?;
        for offer in offered(record).filter_map(|of| of.offer.as_mut()) {
            if let Next::Blocked(why) = mig::next(&offer.place, offer.recorded, &gpus) {
                return Err(PrepareError::Blocked(why));
            }
            offer.recorded = true;
        }
        Ok(())
    }

    /// Makes the instances whose places a record on disk names. `resumed`: it named them before, so that some may be there.
    async fn make_instances(&self, record: &mut Record, resumed: bool) -> Result<(), PrepareError> {
        for index in 0..record.shares.len() {
            let Some(offer) = record.shares[index].of.offer.clone() else {
                continue;
            };
            match self.make_instance(&offer.place, resumed).await {
                Ok(made) => {
                    let of = &mut record.shares[index].of;
                    (of.uuid, of.mig) = (made.1.device, Some(made.0));
                }
                Err(error) => {
                    if is_refused(&error) {
                        // Nothing was made: what comes there is another's.
                        record.shares[index].of.offer = Some(Offer {
                            recorded: false,
                            ..offer
                        });
                        self.write(record).await?;
                    }
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// The instance at a place that the claim's record names: its numbers and its device.
    async fn make_instance(
        &self,
        place: &Place,
        resumed: bool,
    ) -> Result<(Mig, MigCompute), PrepareError> {
        let next = match resumed {
            true => mig::next(place, true, &self.daemon.mig_gpus().await?),
            // The daemon refuses it if someone was faster.
            false => Next::Make,
        };
        let (gpu_instance, compute) = match next {
            Next::Use(gpu_instance, compute) => (gpu_instance, Some(compute)),
            Next::Blocked(why) => return Err(PrepareError::Blocked(why)),
            Next::Make | Next::Remake(_) => {
                if let Next::Remake(half) = next {
                    self.daemon.remove_mig(&place.gpu, half, None).await?;
                }
                let new = NewMigInstance {
                    gpu: place.gpu.clone(),
                    profile: place.profile.clone(),
                    start: place.start,
                };
                let made = self.daemon.make_mig(&new).await?;
                (made.gpu_instance, made.compute_instances.into_iter().next())
            }
        };
        let none = || PrepareError::Blocked(format!("NVML lists no device of {place}"));
        let compute = compute.filter(|it| !it.device.is_empty());
        let compute = compute.ok_or_else(none)?;
        let numbers = Mig {
            gpu_instance,
            compute_instance: compute.compute_instance,
        };
        Ok((numbers, compute))
    }

    /// Removes the instances that a record names, and no other.
    async fn remove_instances(&self, record: &Record) -> Result<(), PrepareError> {
        let gpus = self.daemon.mig_gpus().await?;
        for of in record.shares.iter().map(|share| &share.of) {
            let Some(offer) = &of.offer else { continue };
            let Some((id, device)) = mig::removal(offer, &of.uuid, &gpus) else {
                continue;
            };
            let gpu = &offer.place.gpu;
            match self.daemon.remove_mig(gpu, id, device.as_deref()).await {
                Err(ClientError::Refused { status: 404, .. }) => {}
                removed => removed?,
            }
        }
        Ok(())
    }

    /// Writes a record, which then would survive a power failure.
    async fn write(&self, record: &Record) -> Result<(), PrepareError> {
        let (store, record) = (self.store.clone(), record.clone());
        let written = tokio::task::spawn_blocking(move || {
            store.write(&record)?;
            store.sync()
        });
        Ok(written.await??)
    }

    /// Gives prepared claims back what they have lost, as after a reboot: tenants that the daemon does not know, and MIG instances.
    /// Undoes a half-prepared claim that needs such an instance. How many claims were given something back.
    ///
    /// # Errors
    /// The daemon, or the disk. What could be done is.
    pub async fn restore(&self) -> Result<usize, PrepareError> {
        let records = self.store.all()?;
        let living = self.daemon.tenants().await?;
        let gpus = match records.iter().any(|record| has_offers(record)) {
            true => self.daemon.mig_gpus().await?,
            false => Vec::new(),
        };
        let lacks = |record: &Record| {
            let tenants = record.tenants.iter();
            let mut missing =
                tenants.filter(|tenant| living.iter().all(|there| there.name != tenant.name));
            match record.ready {
                true => missing.next().is_some() || has_lost(record, &gpus),
                false => has_offers(record),
            }
        };
        let (mut restored, mut result) = (0, Ok(()));
        for record in records.into_iter().filter(|record| lacks(record)) {
            let _lock = self.lock(&record.claim.uid).await?;
            // It may have gone while we waited, or have become ready.
            let done = match self.store.get(&record.claim.uid)? {
                Some(record) if record.ready => self.renew(&record).await.map(|_| restored += 1),
                Some(record) if has_offers(&record) => self.unmake(&record).await,
                _ => Ok(()),
            };
            result = result.and(done);
        }
        result.map(|()| restored)
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
        let mut now = Record {
            patch: patch.map(str::to_owned),
            ..record.as_ref().clone()
        };
        let made = self.make_tenants(&mut now, true).await;
        if made.is_err() {
            // Of several tenants, some may have been changed.
            now.patch.clone_from(&record.patch);
            let _ = self.make_tenants(&mut now, true).await;
        }
        if now != *record {
            self.store.write(&now)?;
        }
        if now.tenants != record.tenants {
            self.describe(&now)?;
        }
        made
    }

    async fn fetch(&self, claim: &ClaimRef) -> Result<ResourceClaim, PrepareError> {
        let api: Api<ResourceClaim> = Api::namespaced(self.kube.clone(), &claim.namespace);
        let found = tokio::time::timeout(API_PATIENCE, api.get_opt(&claim.name))
            .await
            .map_err(|_| PrepareError::Slow)??;
        found.ok_or_else(|| PrepareError::Gone(claim.namespace.clone(), claim.name.clone()))
    }

    /// Makes the claim's tenants, or changes those that are there if they are known to be this record's. It has then what the
    /// processes of new ones need in their environment.
    async fn make_tenants(&self, record: &mut Record, known: bool) -> Result<(), PrepareError> {
        for (index, new) in tenants(record)? {
            let name = new.name.as_deref().unwrap_or_default();
            let created = match self.daemon.create(&new).await {
                Err(ClientError::Refused { status: 409, .. }) if known => {
                    self.daemon.change(name, &new.spec).await?;
                    continue;
                }
                Err(ClientError::Refused { status: 409, .. }) => {
                    // Left by a claim whose record was lost, so that its secret is not ours, or by a driver that was killed.
                    self.end_tenant(name).await?;
                    self.daemon.create(&new).await?
                }
                created => created?,
            };
            record.tenants[index].environment = created.environment;
        }
        Ok(())
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

/// The devices of a record that are MIG instances made for it.
fn offered(record: &mut Record) -> impl Iterator<Item = &mut Device> {
    let all = record.shares.iter_mut().map(|share| &mut share.of);
    all.filter(|of| of.offer.is_some())
}

fn has_offers(record: &Record) -> bool {
    record.shares.iter().any(|share| share.of.offer.is_some())
}

/// Whether an instance that was made for a record is not there any more.
fn has_lost(record: &Record, gpus: &[MigGpu]) -> bool {
    record.shares.iter().any(|share| {
        let of = &share.of;
        of.offer.as_ref().is_some_and(|offer| {
            !matches!(mig::next(&offer.place, true, gpus), Next::Use(_, found) if found.device == of.uuid)
        })
    })
}

/// Whether the daemon reports that it made nothing.
fn is_refused(error: &PrepareError) -> bool {
    matches!(
        error,
        PrepareError::Daemon(ClientError::Refused {
            status: 403 | 404 | 409 | 422,
            ..
        })
    )
}

/// Whether a claim has the shares that it had, whatever has been made for them.
fn are_same(before: &[Share], now: &[Share]) -> bool {
    let same = |(before, now): (&Share, &Share)| {
        let as_before = Share {
            of: before.of.clone(),
            ..now.clone()
        };
        match now.of.offer.is_some() {
            true => as_before == *before && before.of.is(&now.of),
            false => before == now,
        }
    };
    before.len() == now.len() && before.iter().zip(now).all(same)
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
