// Shows one step at a time. Without scripts every step is shown, one below the other.
(function(){
var steps=[].slice.call(document.querySelectorAll('section[data-step]'));
var picker=document.querySelector('.picker');
if(!picker||!steps.length)return;
var select=picker.querySelector('select');
var back=picker.querySelector('.back'),next=picker.querySelector('.next');
function show(index){
steps.forEach(function(section,i){section.hidden=i!==index;});
select.selectedIndex=index;back.disabled=index===0;next.disabled=index===steps.length-1;
}
select.addEventListener('change',function(){show(select.selectedIndex);});
back.addEventListener('click',function(){show(select.selectedIndex-1);});
next.addEventListener('click',function(){show(select.selectedIndex+1);});
picker.hidden=false;show(steps.length-1);
})();
